"""Translate the arguments of Lightning 1.x's ``Trainer`` to today's.

An older argument that is ``None`` was not given, because that was its default; only ``gpus=None``
has a meaning: no GPU. Giving both spellings is an error.
"""

import os
from collections.abc import Mapping
from typing import Any

from jsonargparse.typing import PositiveInt

from ..errors import ConfigurationError, Problems, nearest, shown
from ..launch.devices import ADDED
from ..options import Options, values
from .plugins import NAMES, Plugin

_Values = Mapping[str, Any]
TYPES: _Values = {
    "gpus": int | str | list[int] | None,
    "num_processes": PositiveInt | None,
    "tpu_cores": int | str | list[int] | None,
    "plugins": Any,
    "distributed_backend": str | None,
    "replace_sampler_ddp": bool | None,
    "num_sanity_val_steps": int | None,
    "amp_backend": str | None,
    "resume_from_checkpoint": str | os.PathLike[str] | None,
    "logger": bool | Any,
}
_RENAMED = {
    "replace_sampler_ddp": "use_distributed_sampler",
    "num_sanity_val_steps": "sanity_check",
    "resume_from_checkpoint": "resume",
    "logger": "loggers",
}
# Their default was None.
_WERE_NONE = ("accelerator", "devices", "strategy")
_COUNTS = ("gpus", "num_processes", "tpu_cores")
# Values of accelerator and distributed_backend that named a strategy.
_MODES = {
    **{name: name for name in ("dp", "ddp", "ddp_spawn", "ddp2", "horovod")},
    "ddp_cpu": "ddp",
}
# What plugins=… made of accelerator="ddp_spawn".
_SPAWNED = {
    "ddp": "ddp_spawn",
    "ddp_spawn": "ddp_spawn",
    "ddp_sharded": "ddp_sharded_spawn",
    "ddp_sharded_spawn": "ddp_sharded_spawn",
}
_HARDWARE = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}
_PRECISIONS = {"16": "16-mixed", "32": "32-true", "bf16": "bf16-mixed"}


def translate(given: _Values) -> dict[str, Any]:
    """Translate a trainer's arguments to their current spelling.

    Args:
        given: The arguments that were given, by name.

    Raises:
        ConfigurationError: One line for each invalid value of an older argument, and for each pair
            of arguments that contradict each other.
    """
    older = {
        name: value
        for name, value in given.items()
        if name in TYPES and (value is not None or name == "gpus")
    }
    current = {
        name: "auto" if value is None and name in _WERE_NONE else value
        for name, value in given.items()
        if name not in TYPES
    }
    problems = Problems()
    for name in values.check(TYPES, older, problems):
        del older[name]
    translated = dict(current)
    for part in (_strategy, _hardware):
        with problems:
            translated |= part(older, current)
    for name in older.keys() & _RENAMED:
        with problems:
            translated |= _renamed(name, older[name], current)
    if (bits := shown(current.get("precision")).strip("'")) in _PRECISIONS:
        translated["precision"] = _PRECISIONS[bits]
    if (backend := older.get("amp_backend", "native")) != "native":
        # https://github.com/NVIDIA/apex/pull/1896
        problems.add(f"amp_backend={shown(backend)}: use 'native'; apex has no mixed precision")
    problems.raise_any()
    return translated


def _strategy(older: _Values, current: _Values) -> dict[str, Any]:
    backend = older.get("distributed_backend")
    if backend is not None and backend not in _MODES:
        raise ConfigurationError(
            f"distributed_backend={shown(backend)} is unknown{nearest(backend, _MODES)}"
        )
    named = _modes(older, current)
    modes = [_MODES[each] for each in named.values()]
    named |= {name: older[name] for name in ("plugins", "tpu_cores") if name in older}
    if not _is(current.get("strategy", "auto"), "auto"):
        named["strategy"] = current["strategy"]
    if "plugins" in named:
        named["plugins"] = _only(named["plugins"])
    given = named.get("plugins", named.get("strategy"))
    if isinstance(given, str) and "plugins" in named:
        given = NAMES[given]() if given in NAMES else given
    plugin = given if isinstance(given, Plugin) else None
    if named.keys() <= {"strategy"} and plugin is None:
        return {}
    wanted = given if plugin is None else plugin.strategy
    if len(named) == 1:
        wanted = next(iter(modes), wanted)
        if "tpu_cores" in named:
            wanted = _on_tpus(named["tpu_cores"])
    elif len(named) == 2 and modes and "plugins" in named and modes[0] in ("ddp", "ddp_spawn"):
        is_spawned = modes[0] == "ddp_spawn"
        wanted = _SPAWNED.get(wanted if isinstance(wanted, str) else "") if is_spawned else wanted
    else:
        wanted = None
    if wanted is None:
        raise ConfigurationError(f"{_listed(named)} each name a strategy; give only strategy")
    if plugin is None:
        return {"strategy": wanted}
    if options := current.get("strategy_options"):
        raise ConfigurationError(
            f"strategy_options={_shown(options)} and {_shown(plugin)} each set options of the "
            "strategy; give only one of them"
        )
    return plugin.current(wanted)


def _only(given: Any) -> Any:
    if not isinstance(given, list | tuple):
        return given
    if len(given) != 1:
        raise ConfigurationError(f"plugins={_shown(given)}: give one, or strategy in its place")
    return given[0]


def _on_tpus(cores: Any) -> str:
    if "tpu" not in ADDED:
        raise ConfigurationError(f"tpu_cores={shown(cores)}: TPUs are not supported; use devices")
    return ADDED["tpu"].strategy


def _modes(older: _Values, current: _Values) -> dict[str, Any]:
    """The arguments that name a strategy, as ``accelerator`` once could."""
    given = {
        "accelerator": current.get("accelerator"),
        "distributed_backend": older.get("distributed_backend"),
    }
    return {name: each for name, each in given.items() if isinstance(each, str) and each in _MODES}


def _is(value: object, text: str) -> bool:
    return isinstance(value, str) and value == text


def _hardware(older: _Values, current: _Values) -> dict[str, Any]:
    counts = {name: older[name] for name in _COUNTS if name in older}
    modes = _modes(older, current)
    if not counts and not modes:
        return {}
    if len(counts) > 1 and not counts.get("gpus", 1):
        del counts["gpus"]  # "no GPU" does not contradict the other arguments
    has_counts = bool(counts)
    if not _is(current.get("devices", "auto"), "auto"):
        counts["devices"] = current["devices"]
    if len(counts) > 1:
        raise ConfigurationError(f"{_listed(counts)} each select devices; give only devices")
    accelerator = current.get("accelerator", "auto")
    named = {**modes, **counts, "accelerator": accelerator}
    means = {name: "cpu" for name, mode in modes.items() if mode == "ddp_cpu"}
    if isinstance(accelerator, str) and accelerator in _HARDWARE:
        means["accelerator"] = _HARDWARE[accelerator]
    changes: dict[str, Any] = {}
    for name in counts.keys() & _COUNTS:
        means[name], changes["devices"] = _counted(name, counts[name])
    if len({*means.values()}) > 1:
        each = _listed({name: named[name] for name in means})
        raise ConfigurationError(f"{each} contradict each other; give accelerator and devices")
    if not isinstance(accelerator, str) or accelerator not in ("auto", *_MODES, *_HARDWARE):
        return changes  # an unknown accelerator is reported later
    # accelerator="horovod" without GPUs was Horovod on CPUs.
    on_cpu = not has_counts and not counts and "horovod" in modes.values()
    return changes | {"accelerator": next(iter(means.values()), "cpu" if on_cpu else "auto")}


def _counted(name: str, value: Any) -> tuple[str, Any]:
    """The accelerator and the devices that an older argument means.

    ``gpus``: ``3``: the first three; ``"3"``: GPU 3; ``0``, ``None``: the CPU. ``tpu_cores``:
    ``8``, ``"8"``: the number; ``[1]``, ``"1,"``, ``"5"``: that core, counted from 1.
    """
    if name == "num_processes":
        return "cpu", int(value)
    indices = value
    try:
        if isinstance(value, str) and (name == "tpu_cores" or "," not in value):
            indices = [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise ConfigurationError(f"{name}={shown(value)}: give a number, or indices") from None
    if name == "gpus":
        if value is None or value == 0:
            return "cpu", "auto" if value is None else 1
        is_negative = isinstance(value, str) and isinstance(indices, list) and min(indices) < 0
        return "gpu", indices[0] if is_negative else indices
    if value in ("1", "8"):
        indices = indices[0]
    if isinstance(indices, int) and indices > 0:
        return "tpu", indices
    if isinstance(indices, list) and len(indices) == 1 and indices[0] in range(1, 9):
        return "tpu", [indices[0] - 1]
    raise ConfigurationError(
        f"tpu_cores={shown(value)}: give how many, or one of them as [1] to [8]"
    )


def _renamed(older: str, value: Any, current: _Values) -> dict[str, Any]:
    name = _RENAMED[older]
    default = getattr(Options, name)
    if name in current and current[name] not in (
        default,
        [*default] if name == "loggers" else default,
    ):
        both = _listed({older: value, name: current[name]})
        raise ConfigurationError(f"{both} are two spellings of one option; give only {name}")
    if older == "logger":
        if isinstance(value, bool):
            return {} if value else {name: ()}
        value = value if isinstance(value, list | tuple) else [value]
    return {name: os.fspath(value) if older == "resume_from_checkpoint" else value}


def _listed(arguments: _Values) -> str:
    return " and ".join(f"{name}={_shown(value)}" for name, value in arguments.items())


def _shown(value: Any) -> str:
    """A value as written; an object by its class."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return shown(value) if type(value).__module__ == "builtins" else type(value).__name__
