"""Plugins of Lightning 1.x: objects that named a strategy, with its options."""

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigurationError, UserError, refuse
from ..launch import rendezvous
from ..launch.cluster import Layout
from ..strategies import create
from ..strategies.base import StepModule
from ..strategies.replicated.ddp import DDP

__all__ = ["DDPPlugin", "DeepSpeedPlugin", "RPCSequentialPlugin"]
_METHODS = (  # methods that users were told to override; the trainer calls those of a strategy
    *("configure_ddp", "configure_sampler", "init_ddp_connection", "model_to_device"),
    *("optimizer_step", "pre_dispatch", "reduce", "start_training", "training_step"),
)


class Plugin:
    """An object that named a strategy, with options of this strategy."""

    strategy: ClassVar[str]
    called: ClassVar[tuple[str, ...]] = ()  # methods that subclasses may override
    options: Mapping[str, Any] = {}

    def __init__(self, **options: Any) -> None:
        self.options = options

    def current(self, strategy: str) -> dict[str, Any]:
        """The arguments of a trainer that mean the same with this strategy."""
        advice = "override a strategy's methods, in a class of your own that you give as strategy=…"
        wrong = (name for name in _METHODS if name not in self.called and hasattr(self, name))
        refuse([f"{type(self).__name__}.{name} would not be called; {advice}" for name in wrong])
        return {"strategy": strategy, "strategy_options": dict(self.options)}


class RPCSequentialPlugin(Plugin):
    """``strategy="sequential"`` with the defaults of Lightning; ``balance``: children per stage."""

    strategy = "sequential"

    def __init__(self, balance: Sequence[int] | None = None, **options: Any) -> None:
        stages = {"balance": "memory"} if balance is None else {"stages": len(balance)}
        settings = options if balance is None else {"balance": balance, **options}
        super().__init__(**{"microbatches": 8, "checkpoint": "except_last", **stages, **settings})


class DeepSpeedPlugin(Plugin):
    """``strategy="deepspeed"`` with ZeRO-Offload (``cpu_offload``), which was Lightning's default.

    ``config``: DeepSpeed's own, as a dict or the path of a JSON file, without other arguments;
    ``options``: those of the strategy; sizes of buckets may be floats such as 5e8.
    """

    strategy = "deepspeed"

    def __init__(
        self, config: Mapping[str, Any] | str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        if config is not None and options:
            names = ", ".join(sorted(options))
            raise ConfigurationError(f"DeepSpeedPlugin: config replaces {names}; set them there")
        offload = {"offload_optimizer": options.pop("cpu_offload", True)}
        options |= offload if config is None else {"config": config}
        sizes = {name: int(option) for name, option in options.items() if isinstance(option, float)}
        super().__init__(**{**options, **sizes})


class DDPPlugin(Plugin):
    """``strategy="ddp"``; subclasses may override its methods."""

    strategy = "ddp"
    called = ("init_ddp_connection", "configure_ddp")

    model: Any = None  # the module to wrap, and what :meth:`configure_ddp` made of it
    ddp: "PluginDDP"  # the strategy that calls these methods

    def init_ddp_connection(self, global_rank: int, world_size: int) -> None:
        """Initialize the process group.

        ``MASTER_ADDR`` and ``MASTER_PORT`` are set during this call, so that an override can call
        ``torch.distributed.init_process_group(backend, rank=global_rank, world_size=world_size)``.
        """
        DDP.init_process_group(self.ddp, *self.ddp.where)

    def configure_ddp(self) -> None:
        """Wrap ``self.model``: replace it by a ``DistributedDataParallel`` of it."""
        self.model = DDP.wrap(self.ddp, self.model)

    def current(self, strategy: str) -> dict[str, Any]:
        """The trainer's arguments; if methods are overridden, with a strategy that calls them."""
        current = super().current(strategy)
        if all(getattr(type(self), name) is getattr(DDPPlugin, name) for name in self.called):
            return current
        named = create(strategy, current["strategy_options"])  # reports invalid options
        made = PluginDDP(self, current["strategy_options"])
        made.limits = named.limits
        return {"strategy": made}


class PluginDDP(DDP):
    """``ddp`` whose process group and wrapper are made by methods of the user's plugin."""

    where: tuple[Layout, torch.device]

    def __init__(self, plugin: DDPPlugin, options: Mapping[str, Any]) -> None:
        super().__init__(**options)
        self.plugin = plugin
        plugin.ddp = self

    def init_process_group(self, layout: Layout, device: torch.device) -> None:
        self.where = layout, device
        with _address_variables(layout, timedelta(seconds=self.timeout_seconds)):
            self.plugin.init_ddp_connection(layout.rank, layout.world_size)
        if not dist.is_initialized():
            raise UserError(
                f"{type(self.plugin).__name__}.init_ddp_connection did not initialize the process "
                "group: call torch.distributed.init_process_group, or super()'s method"
            )

    def wrap(self, module: StepModule) -> DistributedDataParallel:
        self.plugin.model = module
        self.plugin.configure_ddp()
        wrapped, self.plugin.model = self.plugin.model, None
        if not isinstance(wrapped, DistributedDataParallel):
            raise UserError(
                f"{type(self.plugin).__name__}.configure_ddp must set self.model to a "
                f"DistributedDataParallel of it; it is a {type(wrapped).__name__}"
            )
        return wrapped


@contextmanager
def _address_variables(layout: Layout, timeout: timedelta) -> Iterator[None]:
    """Set ``MASTER_ADDR`` and ``MASTER_PORT``, which torch reads, unless a launcher has."""
    before = dict(os.environ)
    if os.environ.get("MASTER_PORT", "0") == "0":
        store = rendezvous.connect_store(layout, timeout)
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
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


# Examples import plugins from these modules, too.
for _name in ("training_type", "training_type.ddp", "training_type.rpc_sequential"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
