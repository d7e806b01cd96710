"""Translate older spellings of the trainer's arguments; the only place that knows them.

An older argument that is ``None`` was not given, because that was its default; only ``gpus=None``
has a meaning: no GPU. Giving both spellings is an error.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError, Problems, shown
from . import other_trainers
from .options import Options
from .plugin import Plugin
from .values import fits

# A string, so that the types of arguments need not include another type.
NOT_GIVEN = "not given"
ARGUMENTS = (
    "gpus",
    "num_processes",
    "tpu_cores",
    "plugins",
    "distributed_backend",
    "replace_sampler_ddp",
    "num_sanity_val_steps",
    "amp_backend",
    "resume_from_checkpoint",
    "logger",
)

_Values = Mapping[str, Any]

# The current arguments that replace older ones, with their defaults.
_DEFAULTS: dict[str, Any] = {
    name: getattr(Options, name)
    for name in (
        "accelerator",
        "devices",
        "strategy",
        "precision",
        "use_distributed_sampler",
        "sanity_check",
        "resume",
        "loggers",
    )
}
# Arguments that still exist, but whose default was None.
_NONE_IS_AUTO = ("accelerator", "devices", "strategy")
# A value that both of these arguments accepted, and its strategy.
_MODE_ARGUMENTS = ("accelerator", "distributed_backend")


@dataclass(frozen=True)
class Mode:
    """A strategy that :data:`_MODE_ARGUMENTS` once named.

    Args:
        strategy: Name of the strategy.
        on_cpu: Whether it ran on CPUs without arguments for devices; others leave it open.
    """

    strategy: str
    on_cpu: bool = False


# An engine's folder adds its own.
MODES = {
    "dp": Mode("dp"),
    "ddp": Mode("ddp"),
    "ddp_cpu": Mode("ddp"),
    "ddp_spawn": Mode("ddp_spawn"),
    "ddp2": Mode("ddp2"),
}
_HARDWARE = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}
# Strategies to which plugins changed ddp_spawn; with ddp, the plugin itself names the strategy.
SPAWNED: dict[str, str] = {}
# Former values of plugins that had options of their own, and what creates the plugin they mean.
PLUGINS: dict[str, Callable[[], Plugin]] = {}
_PRECISIONS = {"16": "16-mixed", "32": "32-true", "bf16": "bf16-mixed"}


# Strategies of the accelerators that engines add, by the accelerator.
STRATEGIES_ON: dict[str, str] = {}


def translate(given: _Values) -> dict[str, Any]:
    """Translate a trainer's arguments to their current spelling.

    Args:
        given: All arguments by name, older and current; the default of the older ones is
            :data:`NOT_GIVEN`.

    Raises:
        ConfigurationError: One line for each invalid value of an older argument, and for each pair
            of arguments that contradict each other.
    """
    older = {name: given[name] for name in ARGUMENTS if _is_given(given, name)}
    translated = {
        name: "auto" if value is None and name in _NONE_IS_AUTO else value
        for name, value in given.items()
        if name not in ARGUMENTS
    }
    newer = _DEFAULTS | translated
    problems = Problems()
    if "tpu_cores" in older and "tpu" not in STRATEGIES_ON:
        cores = older.pop("tpu_cores")
        problems.add(f"tpu_cores={shown(cores)}: TPUs are not supported; use devices")
    for part in (_strategy, _hardware, _precision):
        with problems:
            translated |= part(older, newer)
    for name, (newer_name, convert) in _RENAMED.items():
        if name in older:
            with problems:
                _refuse_both(name, newer_name, older, newer)
                translated[newer_name] = convert(older[name])
    with problems:
        _check_amp_backend(older.get("amp_backend", "native"))
    problems.raise_any()
    return translated


def _is_given(given: _Values, name: str) -> bool:
    value = given.get(name, NOT_GIVEN)
    if value is None:
        return name == "gpus"
    return not (isinstance(value, str) and value == NOT_GIVEN)


# --- strategy ------------------------------------------------------------------------------------


def _strategy(older: _Values, newer: _Values) -> dict[str, Any]:
    backend = older.get("distributed_backend")
    if backend is not None and not _is_mode(backend):
        raise ConfigurationError(other_trainers.unknown("distributed_backend", backend, MODES))
    named: dict[str, Any] = dict(_modes(older, newer))
    if "plugins" in older:
        named["plugins"] = _plugin(older["plugins"])
    if "tpu_cores" in older:
        named["tpu_cores"] = older["tpu_cores"]
    wanted = newer["strategy"]
    if not named and not isinstance(wanted, Plugin):
        return {}
    if not _is_auto(wanted):
        named["strategy"] = wanted
    strategy = _combined(named)
    if strategy is None:
        raise ConfigurationError(f"{_listed(named)} each name a strategy; give only strategy")
    name, plugin = strategy
    return {"strategy": name} if plugin is None else _translated(name, plugin, newer)


def _is_auto(strategy: Any) -> bool:
    return isinstance(strategy, str) and strategy == "auto"


def _translated(strategy: str, plugin: Plugin, newer: _Values) -> dict[str, Any]:
    current = plugin.current(strategy)
    if newer.get("strategy_options"):
        raise ConfigurationError(
            f"strategy_options={_shown(newer['strategy_options'])} and {_shown(plugin)} each set "
            "options of the strategy; give only one of them"
        )
    return current


def _modes(older: _Values, newer: _Values) -> dict[str, str]:
    """The arguments that name a strategy, as ``accelerator`` once could."""
    values = (newer["accelerator"], older.get("distributed_backend"))
    named = zip(_MODE_ARGUMENTS, values, strict=True)
    return {name: value for name, value in named if _is_mode(value)}


def _is_mode(value: Any) -> bool:
    return isinstance(value, str) and value in MODES


def _combined(named: _Values) -> tuple[Any, Plugin | None] | None:
    """The strategy that a mode and a plugin mean together, and the plugin; or None."""
    modes = [MODES[mode].strategy for name, mode in named.items() if name in _MODE_ARGUMENTS]
    given = named.get("plugins", named.get("strategy"))
    plugin = _made(given)
    own = given if plugin is None else plugin.strategy
    if len(named) == 1:
        return (modes[0] if modes else own or STRATEGIES_ON.get("tpu")), plugin
    if len(named) > 2 or not modes or "plugins" not in named:
        return None
    spawned = SPAWNED.get(own) if isinstance(own, str) else None
    strategy = {"ddp": own, "ddp_spawn": spawned}.get(modes[0])
    return None if strategy is None else (strategy, plugin)


def _made(given: Any) -> Plugin | None:
    """The plugin that a value is or names; None: another one."""
    if isinstance(given, str) and given in PLUGINS:
        return PLUGINS[given]()
    return given if isinstance(given, Plugin) else None


def _plugin(value: Any) -> Any:
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ConfigurationError(f"plugins={_shown(value)}: give one, or strategy in its place")
        value = value[0]
    if _made(value) is not None:
        return value
    if line := other_trainers.about("plugins", value):
        raise ConfigurationError(line)
    # Checked by method: the class Strategy is in a folder above this one.
    if isinstance(value, str) or callable(getattr(value, "forward_backward", None)):
        return value
    raise ConfigurationError(
        f"plugins={_shown(value)}: give a strategy, by its name or made; others are not taken"
    )


# --- hardware ------------------------------------------------------------------------------------


def _hardware(older: _Values, newer: _Values) -> dict[str, Any]:
    counts = {name: older[name] for name in _COUNTS if name in older}
    modes = _modes(older, newer)
    if not counts and not modes:
        return {}
    if len(counts) > 1 and "gpus" in counts and _is_none(counts["gpus"]):
        del counts["gpus"]  # "no GPU" does not contradict the other arguments
    if newer["devices"] != "auto":
        counts["devices"] = newer["devices"]
    if len(counts) > 1:
        raise ConfigurationError(f"{_listed(counts)} each select devices; give only devices")
    # The hardware that each argument names, and the arguments as given.
    about = {name: "cpu" for name, mode in modes.items() if mode == "ddp_cpu"}
    given: dict[str, Any] = dict(counts) | modes
    accelerator = newer["accelerator"]
    if accelerator in _HARDWARE:
        given["accelerator"], about["accelerator"] = accelerator, _HARDWARE[accelerator]
    changes: dict[str, Any] = {}
    for name in counts.keys() & _COUNTS.keys():
        about[name], changes["devices"] = _COUNTS[name](counts[name])
    if len(set(about.values())) > 1:
        each = _listed({name: given[name] for name in about})
        raise ConfigurationError(f"{each} contradict each other; give accelerator and devices")
    if accelerator not in ("auto", *MODES, *_HARDWARE):
        return changes  # an unknown accelerator is reported later
    on_cpu = not counts and any(MODES[mode].on_cpu for mode in modes.values())
    hardware = next(iter(about.values()), "cpu" if on_cpu else "auto")
    return changes | {"accelerator": hardware}


def _is_none(gpus: Any) -> bool:
    return gpus is None or (type(gpus) is int and gpus == 0)


def _gpus(value: Any) -> tuple[str, Any]:
    """``3``: the first three; ``"3"``: GPU 3; ``0``, ``None``: CPU; others as in ``devices``."""
    wrong = f"gpus={_shown(value)}: give a number, a list of indices, or None for the CPU"
    if value is None:
        return "cpu", "auto"
    if isinstance(value, str) and "," not in value:
        try:
            index = int(value)
        except ValueError:
            raise ConfigurationError(wrong) from None
        value = [index] if index >= 0 else index
    if isinstance(value, bool) or not isinstance(value, int | str | list):
        raise ConfigurationError(wrong)
    return ("cpu", 1) if value == 0 else ("gpu", value)


def _num_processes(value: Any) -> tuple[str, Any]:
    if type(value) is not int or value < 1:
        raise ConfigurationError(
            f"num_processes={_shown(value)}: give a whole number of at least 1"
        )
    return "cpu", value


def _tpu_cores(value: Any) -> tuple[str, Any]:
    """``8``, ``"8"``: the number; ``[1]``, ``"1,"``: the first core; cores were counted from 1."""
    cores = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        cores = [int(part) if part.isdecimal() else part for part in parts]
        if value.strip() in ("1", "8"):
            cores = cores[0]
    if type(cores) is int and cores >= 1:
        return "tpu", cores
    if isinstance(cores, list) and len(cores) == 1 and type(cores[0]) is int:
        index = cores[0] - 1
        if index in range(8):
            return "tpu", [index]
    raise ConfigurationError(
        f"tpu_cores={_shown(value)}: give how many, or one of them as [1] to [8]"
    )


_COUNTS: dict[str, Callable[[Any], tuple[str, Any]]] = {
    "gpus": _gpus,
    "num_processes": _num_processes,
    "tpu_cores": _tpu_cores,
}


# --- the others ----------------------------------------------------------------------------------


def _precision(older: _Values, newer: _Values) -> dict[str, Any]:
    value = newer["precision"]
    if shown(value).strip("'") in _PRECISIONS:
        return {"precision": _PRECISIONS[str(value)]}
    is_in_bits = not isinstance(value, str) or value.isdecimal()  # others: see precision.py
    if is_in_bits and (line := other_trainers.about("precision", value)):
        raise ConfigurationError(line)
    if not isinstance(value, str):
        known = ", ".join(f"{old} ({new!r})" for old, new in _PRECISIONS.items())
        raise ConfigurationError(f"precision={_shown(value)}: there is no such; known: {known}")
    return {}


def _check_amp_backend(value: Any) -> None:
    if isinstance(value, str) and value == "apex":
        # https://github.com/NVIDIA/apex/pull/1896
        raise ConfigurationError(
            "amp_backend='apex': apex has no mixed precision since 2025; use 'native', torch's own"
        )
    if not isinstance(value, str) or value != "native":
        raise ConfigurationError(f"amp_backend={_shown(value)} is unknown; known: native")


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"replace_sampler_ddp={_shown(value)}: give True or False")
    return value


def _sanity_check(value: Any) -> int:
    if not fits(int, value) or value < 0:
        raise ConfigurationError(
            f"num_sanity_val_steps={_shown(value)}: give a number of batches, at least 0"
        )
    return int(value)


def _path(value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return str(value)
    raise ConfigurationError(
        f"resume_from_checkpoint={_shown(value)}: give a run directory or a checkpoint"
    )


def _loggers(value: Any) -> Any:
    if isinstance(value, bool):
        return _DEFAULTS["loggers"] if value else ()
    return value if isinstance(value, list | tuple) else [value]


_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "replace_sampler_ddp": ("use_distributed_sampler", _switch),
    "num_sanity_val_steps": ("sanity_check", _sanity_check),
    "resume_from_checkpoint": ("resume", _path),
    "logger": ("loggers", _loggers),
}


def spellings(name: str) -> list[str]:
    """An argument's name, and the older names that it was given by."""
    return [name, *(older for older, (newer, _) in _RENAMED.items() if newer == name)]


def _refuse_both(name: str, newer_name: str, older: _Values, newer: _Values) -> None:
    value, default = newer[newer_name], _DEFAULTS[newer_name]
    if (tuple(value) if isinstance(value, list) else value) != default:
        each = _listed({name: older[name], newer_name: value})
        raise ConfigurationError(
            f"{each} are two spellings of one option; give only {newer_name} alone"
        )


def _listed(arguments: _Values) -> str:
    return " and ".join(f"{name}={_shown(value)}" for name, value in arguments.items())


def _shown(value: Any) -> str:
    """A value as written; an object by its class."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return shown(value) if type(value).__module__ == "builtins" else type(value).__name__
