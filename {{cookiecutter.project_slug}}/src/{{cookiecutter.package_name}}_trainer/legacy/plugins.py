"""Plugins of Lightning 1.x: objects that named a strategy, with its options."""

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigurationError, UserError
from ..launch import rendezvous
from ..launch.cluster import Layout
from ..strategies import create
from ..strategies.replicated.ddp import DDP
from ..strategies.step import StepModule

# Methods that users were told to override; the trainer calls those of a strategy.
_METHODS = (
    *("configure_ddp", "configure_sampler", "init_ddp_connection", "model_to_device"),
    *("optimizer_step", "pre_dispatch", "reduce", "start_training", "training_step"),
)


class Plugin:
    """An object that named a strategy; it is translated to the strategy's name.

    Args:
        options: Arguments that are options of the strategy.
    """

    strategy: ClassVar[str]
    """Name of the strategy."""
    called: ClassVar[tuple[str, ...]] = ()
    """Methods that subclasses may override."""
    options: Mapping[str, Any]

    def __init__(self, **options: Any) -> None:
        self.options = options

    def current(self, strategy: str) -> dict[str, Any]:
        """The current arguments of a trainer that mean the same.

        Args:
            strategy: Name of the strategy; it differs from the plugin's own if
                ``accelerator="ddp_spawn"`` changes how processes are started.

        Raises:
            ConfigurationError: One line for each overridden method that would not be called.
        """
        name = type(self).__name__
        lines = [
            f"{name}.{method} would not be called; override a strategy's methods, in a class of "
            "your own that you give as strategy=…"
            for method in _METHODS
            if method not in self.called and hasattr(self, method)
        ]
        if lines:
            raise ConfigurationError(lines)
        return {"strategy": strategy, "strategy_options": dict(getattr(self, "options", {}))}


class DataParallelPlugin(Plugin):
    """Older spelling of ``strategy="dp"``."""

    strategy = "dp"


class DDP2Plugin(Plugin):
    """Older spelling of ``strategy="ddp2"``, with its options."""

    strategy = "ddp2"


class DDPShardedPlugin(Plugin):
    """Older spelling of ``strategy="ddp_sharded"``, with its options."""

    strategy = "ddp_sharded"


class DDPSpawnShardedPlugin(Plugin):
    """Older spelling of ``strategy="ddp_sharded_spawn"``, with its options."""

    strategy = "ddp_sharded_spawn"


class HorovodPlugin(Plugin):
    """Older spelling of ``strategy="horovod"``, with its options."""

    strategy = "horovod"


class RPCSequentialPlugin(Plugin):
    """Older spelling of ``strategy="sequential"``, with its options and its older defaults.

    Args:
        balance: Number of children per stage; default: by what ``balance_mode`` measures.
        microbatches: Number of parts of a batch.
        checkpoint: ``"never"``, ``"except_last"`` or ``"always"``.
        balance_mode: ``"balance_by_size"`` or ``"balance_by_time"``.
        options: Other options of the strategy: ``schedule``, ``stages``, …
    """

    strategy = "sequential"

    def __init__(
        self,
        balance: Sequence[int] | None = None,
        microbatches: int = 8,
        checkpoint: str = "except_last",
        balance_mode: str = "balance_by_size",
        **options: Any,
    ) -> None:
        modes = {"balance_by_size": "memory", "balance_by_time": "time"}
        if balance is not None:
            options = {"stages": len(balance), **options}
        super().__init__(
            balance=modes.get(balance_mode, balance_mode) if balance is None else balance,
            microbatches=microbatches,
            checkpoint=checkpoint,
            **options,
        )


class DeepSpeedPlugin(Plugin):
    """Older spelling of ``strategy="deepspeed"``, with its options and its older defaults.

    Args:
        config: DeepSpeed's own configuration, as a dict or the path of a JSON file; the other
            arguments must then be left out.
        zero_optimization: Shard by ZeRO; False: stage 0.
        cpu_offload: Keep optimizer states on the CPU; default: with a stage above 0.
        options: Other options of the strategy, such as ``stage``; sizes of buckets may be floats
            such as 5e8.
    """

    strategy = "deepspeed"

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        zero_optimization: bool = True,
        cpu_offload: bool | None = None,
        **options: Any,
    ) -> None:
        if not zero_optimization:
            options["stage"] = 0
        if cpu_offload is not None:
            options["offload_optimizer"] = cpu_offload
        if config is None:
            options.setdefault("offload_optimizer", options.get("stage", 2) != 0)
        elif options:
            raise ConfigurationError(
                f"{type(self).__name__}: config replaces {', '.join(sorted(options))}; set them "
                "there"
            )
        else:
            options["config"] = config
        super().__init__(
            **{
                name: int(value) if isinstance(value, float) and value.is_integer() else value
                for name, value in options.items()
            }
        )


class DDPPlugin(Plugin):
    """Older spelling of ``strategy="ddp"``, with its options.

    Subclasses may override :meth:`init_ddp_connection` and :meth:`configure_ddp`.
    """

    strategy = "ddp"
    called = ("init_ddp_connection", "configure_ddp")

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
        made = PluginDDP(self, current["strategy_options"])
        made.launcher, made.limits = named.launcher, named.limits
        return {"strategy": made}


class DDPSpawnPlugin(DDPPlugin):
    """Older spelling of ``strategy="ddp_spawn"``, with its options."""

    strategy = "ddp_spawn"


class PluginDDP(DDP):
    """``ddp`` whose process group and wrapper are made by methods of the user's plugin.

    Args:
        plugin: The plugin.
        options: Those of ``ddp``.
    """

    def __init__(self, plugin: DDPPlugin, options: Mapping[str, Any]) -> None:
        super().__init__(**options)
        self.plugin = plugin

    def init_process_group(self, layout: Layout, device: torch.device) -> None:
        connect = super().init_process_group
        self.plugin._connect = lambda: connect(layout, device)
        with _address_variables(layout, timedelta(seconds=self.timeout_seconds)):
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
def _address_variables(layout: Layout, timeout: timedelta) -> Iterator[None]:
    """Set ``MASTER_ADDR`` and ``MASTER_PORT``, unless a launcher has: torch reads them.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization
    """
    if os.environ.get("MASTER_PORT", "0") != "0":
        yield
        return
    store, before = rendezvous.connect_store(layout, timeout), dict(os.environ)
    if layout.is_main:
        with socket.socket() as listener:
            listener.bind(("", 0))
            store.set("port", str(listener.getsockname()[1]))
    os.environ["MASTER_ADDR"] = layout.main_address
    os.environ["MASTER_PORT"] = store.get("port").decode()
    try:
        yield
    finally:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
            if name in before:
                os.environ[name] = before[name]


NAMES: Mapping[str, Callable[[], Plugin]] = {
    "deepspeed": DeepSpeedPlugin,
    "rpc_sequential": RPCSequentialPlugin,
    "ddp_sequential": RPCSequentialPlugin,
}
# Examples import plugins from these modules, too.
for _name in ("training_type", "training_type.ddp", "training_type.rpc_sequential"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
