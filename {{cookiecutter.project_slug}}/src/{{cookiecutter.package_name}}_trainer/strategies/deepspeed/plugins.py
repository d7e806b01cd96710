"""The plugin of older trainers that means DeepSpeed."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from ...arguments.plugin import Plugin
from ...errors import ConfigurationError, shown

_SIZES = ("allgather_bucket_size", "reduce_bucket_size")


class DeepSpeedPlugin(Plugin):
    """Older spelling of ``strategy="deepspeed"``, with its options and its older defaults.

    Args:
        config: DeepSpeed's own configuration, as a dict or the path of a JSON file; the other
            arguments must then be left out.
        zero_optimization: Shard by ZeRO; False: stage 0.
        cpu_offload: Keep optimizer states on the CPU; default: with a stage above 0.
        allgather_bucket_size: Elements per all-gather of weights, also as a float.
        reduce_bucket_size: Elements per gradient reduction, also as a float.
        options: Other options of the strategy: ``stage``, ``contiguous_gradients``,
            ``overlap_comm``, …
    """

    strategy: ClassVar[str] = "deepspeed"

    def __init__(
        self,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        zero_optimization: bool = True,
        cpu_offload: bool | None = None,
        allgather_bucket_size: float | None = None,
        reduce_bucket_size: float | None = None,
        **options: Any,
    ) -> None:
        if not zero_optimization:
            options["stage"] = 0
        if cpu_offload is not None:
            options["offload_optimizer"] = cpu_offload
        sizes = zip(_SIZES, (allgather_bucket_size, reduce_bucket_size), strict=True)
        options |= {name: size for name, size in sizes if size is not None}
        super().__init__(**options)
        self.config = config

    def current(self, strategy: str) -> dict[str, Any]:
        """The current arguments of a trainer that mean the same.

        Args:
            strategy: Name of the strategy.

        Raises:
            ConfigurationError: Options beside a configuration, which replaces them all; or a size
                that is not a whole number.
        """
        current = super().current(strategy)
        options = current["strategy_options"]
        if self.config is not None:
            if options:
                raise ConfigurationError(
                    f"{type(self).__name__}: config replaces {', '.join(sorted(options))}; set "
                    "them there"
                )
            return {**current, "strategy_options": {"config": self.config}}
        options.setdefault("offload_optimizer", options.get("stage", 2) != 0)
        for name in _SIZES:
            if name in options:
                options[name] = _whole(name, options[name])
        return current


def _whole(name: str, size: Any) -> Any:
    """A float such as 5e8 as the integer it is; other types are checked with the options."""
    if not isinstance(size, float):
        return size
    if not size.is_integer():
        raise ConfigurationError(f"{name}={shown(size)}: give a whole number of elements")
    return int(size)
