"""What is done with parameters, gradients and data: a file a strategy, registered here by name."""

import importlib
import inspect
import math
from typing import Any

from ..arguments import other_trainers, values
from ..errors import ConfigurationError, Problems, nearest, one_line, shown
from .limits import Asked, Limits
from .single_device import SingleDevice

__all__ = ["Asked", "Limits", "SingleDevice", "create", "names", "register", "strategy_class"]

Strategy = SingleDevice
# A year: more than that, and C++ counts nanoseconds that do not fit.
_LONGEST_TIMEOUT = 365 * 24 * 3600

# Name -> "module:Class" below this package, imported when asked for, so that a heavy engine costs
# nothing until it is used.
_REGISTRY: dict[str, str | type[Strategy]] = {
    "single_device": "single_device:SingleDevice",
    "dp": "replicated.dp:DP",
    "ddp": "replicated.ddp:DDP",
    "ddp_spawn": "replicated.ddp_spawn:DDPSpawn",
    "ddp_fork": "replicated.ddp_fork:DDPFork",
    "ddp_notebook": "replicated.ddp_fork:DDPFork",
    "ddp2": "replicated.ddp2:DDP2",
    "horovod": "horovod.strategy:Horovod",
    "ddp_zero1": "replicated.ddp_zero1:DDPZeRO1",
    "fsdp": "fsdp.fsdp:FSDP",
    "hsdp": "fsdp.hsdp:HSDP",
    "ddp_sharded": "fairscale.sharded:DDPSharded",
    "ddp_sharded_spawn": "fairscale.sharded:DDPShardedSpawn",
    "fairscale_fsdp": "fairscale.fsdp:FairScaleFSDP",
    "deepspeed": "deepspeed.strategy:DeepSpeed",
    "deepspeed_stage_1": "deepspeed.stages:DeepSpeedStage1",
    "deepspeed_stage_2": "deepspeed.stages:DeepSpeedStage2",
    "deepspeed_stage_3": "deepspeed.stages:DeepSpeedStage3",
    "deepspeed_stage_2_offload": "deepspeed.stages:DeepSpeedStage2Offload",
    "deepspeed_stage_3_offload": "deepspeed.stages:DeepSpeedStage3Offload",
}


def register(name: str, strategy: type[Strategy]) -> None:
    """Make an own strategy known by a name, for ``Trainer(strategy=name)`` and the command line."""
    _REGISTRY[name] = strategy


def names() -> list[str]:
    """All registered names."""
    return list(_REGISTRY)


def strategy_class(name: object) -> type[Strategy]:
    """The class behind a name, or a class path.

    Raises:
        ConfigurationError: there is no such name; the nearest ones are suggested.
    """
    if not isinstance(name, str):
        shown = getattr(name, "__name__", repr(name))
        raise ConfigurationError(f"strategy={shown} is a class: make one, {shown}(), or name it")
    if "." in name:
        return _imported(name)
    if name not in _REGISTRY:
        raise ConfigurationError(other_trainers.unknown("strategy", name, ["auto", *_REGISTRY]))
    entry = _REGISTRY[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        found: type[Strategy] = getattr(importlib.import_module(f".{module}", __name__), attribute)
        return found
    return entry


def _imported(path: str) -> type[Strategy]:
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"strategy={shown(path)}: give its module too: module{path}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise ConfigurationError(f"strategy={shown(path)}: {one_line(error)}") from None
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigurationError(f"strategy={path!r} is no strategy; subclass {Strategy.__name__}")
    return found


def _options(cls: type[Strategy]) -> list[str]:
    """What a strategy can be made with; what it takes as ``**options``, its base classes name."""
    found: list[str] = []
    for each in cls.__mro__:
        if "__init__" in vars(each):
            parameters = list(inspect.signature(each).parameters.values())
            kinds = {parameter.kind for parameter in parameters}
            named = (p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
            found += named
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                break
    return found


def _instead(cls: type[Strategy], option: str, known: list[str]) -> str:
    return f": {cls.lacks[option]}" if option in cls.lacks else nearest(option, known)


def create(name: str, options: dict[str, Any]) -> Strategy:
    """A strategy by name, made with its own options.

    Raises:
        ConfigurationError: an unknown name or option.
    """
    cls = strategy_class(name)
    known = _options(cls)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ConfigurationError(
            [
                f"strategy_options: {name} has no option {option!r}"
                + (_instead(cls, str(option), known) if known else "; it has none")
                for option in unknown
            ]
        )
    problems = Problems()
    expected: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        expected |= values.hints(each) if "__init__" in vars(each) else {}
    wrong = values.check(expected, options, problems, "strategy_options.")
    for option, value in options.items():
        if option not in wrong and isinstance(value, float) and not math.isfinite(value):
            problems.add(f"strategy_options.{option}={value!r}: expected a finite number")
    timeout = options.get("timeout_seconds", 1)
    if not problems.lines and not 0 < timeout <= _LONGEST_TIMEOUT:
        problems.add(
            f"strategy_options.timeout_seconds={shown(timeout)}: give a number above 0, of at most "
            f"{_LONGEST_TIMEOUT}"
        )
    problems.raise_any()
    try:
        return cls(**options)
    except Exception as error:  # a user's class may raise anything
        raise values.refused(f"strategy={name!r}", cls, options, error) from None
