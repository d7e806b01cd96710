"""Plugins of older trainers that mean a replicated strategy."""

import datetime
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...arguments.plugin import Plugin
from ...errors import UserError
from ...launch import rendezvous
from ...launch.cluster import Layout
from ..creation import create
from ..step import StepModule
from .ddp import DDP


class DataParallelPlugin(Plugin):
    """Older spelling of ``strategy="dp"``."""

    strategy: ClassVar[str] = "dp"


class DDP2Plugin(Plugin):
    """Older spelling of ``strategy="ddp2"``, with its options."""

    strategy: ClassVar[str] = "ddp2"


class DDPPlugin(Plugin):
    """Older spelling of ``strategy="ddp"``, with its options.

    Subclasses may override :meth:`init_ddp_connection` and :meth:`configure_ddp`.
    """

    strategy: ClassVar[str] = "ddp"
    called: ClassVar[tuple[str, ...]] = ("init_ddp_connection", "configure_ddp")

    model: Any = None
    """The module to wrap, and what :meth:`configure_ddp` made of it."""
    _connect: Callable[[], None]
    _wrap: Callable[[StepModule], DistributedDataParallel]

    def init_ddp_connection(self, global_rank: int, world_size: int) -> None:
        """Initialize the process group.

        ``MASTER_ADDR`` and ``MASTER_PORT`` are set during this call, so that an override can call
        ``torch.distributed.init_process_group(backend, rank=global_rank, world_size=world_size)``.
        """
        self._connect()

    def configure_ddp(self) -> None:
        """Wrap ``self.model``: replace it by a ``DistributedDataParallel`` of it."""
        self.model = self._wrap(self.model)

    def current(self, strategy: str) -> dict[str, Any]:
        """The current arguments of a trainer; with overridden methods, a strategy that calls them.

        Args:
            strategy: Name of the strategy.
        """
        current = super().current(strategy)
        if all(getattr(type(self), each) is getattr(DDPPlugin, each) for each in self.called):
            return current
        named = create(strategy, current["strategy_options"])  # reports invalid options
        made = PluginDDP(self)
        made.launcher, made.limits = named.launcher, named.limits
        return {"strategy": made}


class DDPSpawnPlugin(DDPPlugin):
    """Older spelling of ``strategy="ddp_spawn"``, with its options."""

    strategy: ClassVar[str] = "ddp_spawn"


class PluginDDP(DDP):
    """``ddp`` whose process group and wrapper are made by methods of the user's plugin.

    Args:
        plugin: The plugin; its options are those of ``ddp``.
    """

    def __init__(self, plugin: DDPPlugin) -> None:
        super().__init__(**plugin.options)
        self.plugin = plugin

    def init_process_group(self, layout: Layout, device: torch.device) -> None:
        connect = super().init_process_group
        self.plugin._connect = lambda: connect(layout, device)
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        with _address_variables(layout, timeout):
            self.plugin.init_ddp_connection(layout.rank, layout.world_size)
        del self.plugin._connect
        if not dist.is_initialized():
            raise UserError(
                f"{type(self.plugin).__name__}.init_ddp_connection did not initialize the process "
                "group: call torch.distributed.init_process_group, or super()'s method"
            )

    def wrap(self, module: StepModule) -> DistributedDataParallel:
        self.plugin._wrap, self.plugin.model = super().wrap, module
        self.plugin.configure_ddp()
        wrapped = self.plugin.model
        del self.plugin._wrap, self.plugin.model
        if not isinstance(wrapped, DistributedDataParallel):
            raise UserError(
                f"{type(self.plugin).__name__}.configure_ddp must set self.model to a "
                f"DistributedDataParallel of it; it is a {type(wrapped).__name__}"
            )
        return wrapped


@contextmanager
def _address_variables(layout: Layout, timeout: datetime.timedelta) -> Iterator[None]:
    """Set ``MASTER_ADDR`` and ``MASTER_PORT``, unless a launcher has: torch reads them.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization
    """
    if os.environ.get("MASTER_PORT", "0") != "0":
        yield
        return
    store = rendezvous.connect_store(layout, timeout)
    if layout.is_main:
        store.set("port", str(_free_port()))
    added = {"MASTER_ADDR": layout.main_address, "MASTER_PORT": store.get("port").decode()}
    before = {name: os.environ.get(name) for name in added}
    os.environ |= added
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
