"""Plugins: objects of older trainers that named a strategy, with its options.

A strategy's folder declares the plugins that mean its strategies.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from ..errors import ConfigurationError

_ENVIRONMENT = "ranks are read from the environment; leave it out"
# Arguments of plugins that are not options of a strategy.
_ELSEWHERE = {
    "num_nodes": "give num_nodes to Trainer",
    "parallel_devices": "give devices to Trainer",
    "sync_batchnorm": "give sync_batchnorm to Trainer",
    "cluster_environment": _ENVIRONMENT,
    "cluster_environments": _ENVIRONMENT,
}
# Methods of plugins that users were told to override, and methods of a strategy.
_METHODS = {
    "init_ddp_connection": "init_process_group(layout, device)",
    "configure_ddp": "setup(module, configure)",
    "configure_sampler": "data_replicas and data_index",
    "setup_environment": "connect(layout, own_devices, precision)",
    "pre_dispatch": "setup(module, configure)",
    "post_dispatch": "teardown()",
    "start_training": "forward_backward(batch, i, weight=, synchronize=)",
    "training_step": "call_step(stage, batch, i)",
    "validation_step": "call_step(stage, batch, i)",
    "test_step": "call_step(stage, batch, i)",
    "predict": "call_step(stage, batch, i)",
    "predict_step": "call_step(stage, batch, i)",
    "pre_backward": "backward(loss, synchronize=)",
    "post_backward": "backward(loss, synchronize=)",
    "optimizer_step": "optimizer_step(optimizer)",
    "post_optimizer_step": "end_step()",
    "reduce": "reduce(tensor, how)",
    "model_to_device": "place(module)",
    "save_checkpoint": "state(optimization)",
}


class Plugin:
    """An object that named a strategy in older trainers; it is translated to the strategy's name.

    Subclasses name the strategy, and declare the older arguments.

    Args:
        options: Arguments that are options of the strategy.
    """

    strategy: ClassVar[str]
    """Name of the strategy."""
    called: ClassVar[tuple[str, ...]] = ()
    """Methods that subclasses may override."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Methods of its strategy that replace other methods of a plugin."""

    # A subclass of the user's might not call this constructor.
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, **options: Any) -> None:
        self.options = options

    def current(self, strategy: str) -> dict[str, Any]:
        """The current arguments of a trainer that mean the same.

        Args:
            strategy: Name of the strategy; it differs from the plugin's own if
                ``accelerator="ddp_spawn"`` changes how processes are started.

        Raises:
            ConfigurationError: One line for each argument, and each overridden method, that would
                have no effect.
        """
        problems = [*self._misplaced(), *self._overridden()]
        if problems:
            raise ConfigurationError(problems)
        return {"strategy": strategy, "strategy_options": dict(self.options)}

    def _misplaced(self) -> list[str]:
        name = type(self).__name__
        return [
            f"{name}({each}=…): {instead}"
            for each, instead in _ELSEWHERE.items()
            if each in self.options
        ]

    def _overridden(self) -> list[str]:
        name, methods = type(self).__name__, {**_METHODS, **self.instead}
        return [
            f"{name}.{method} would not be called; override {methods[method]} of a strategy, in a "
            "class of your own that you give as strategy=…"
            for method in methods
            if method not in self.called and hasattr(self, method)
        ]
