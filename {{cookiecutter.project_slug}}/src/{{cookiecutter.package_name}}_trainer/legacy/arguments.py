"""Translate the arguments of Lightning 1.x's ``Trainer``; both spellings of one are an error.

An older one that is ``None``, its default, was not given; only ``gpus=None`` has a meaning: no GPU.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ConfigurationError, Problems, instead, shown
from ..options import Options, values
from .plugins import DeepSpeedPlugin, Plugin

_Values = Mapping[str, Any]
TYPES: _Values = {
    "gpus": int | str | list[int] | None,
    "tpu_cores": int | list[int] | None,
    "plugins": Any,
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
_MODES = ("dp", "ddp", "ddp_spawn", "ddp2", "horovod")  # values of accelerator that were strategies
_SPAWNED = {"ddp": "ddp_spawn", "ddp_sharded": "ddp_sharded_spawn"}  # as plugins=… did of ddp_spawn
_KEYWORDS = {  # keywords of fit, validate, test and predict; those of log that change nothing
    **dict.fromkeys(("datamodule", "dataloaders", "train_dataloaders"), "data"),
    **{"model": "module", "ckpt_path": "checkpoint", "val_dataloaders": "val_dataloader"},
}
_OF_LOG = {"logger": True, "rank_zero_only": False, "add_dataloader_idx": True}
_PRECISIONS = {"16": "16-mixed", "32": "32-true", "bf16": "bf16-mixed"}


def translate(arguments: _Values) -> dict[str, Any]:
    """Translate a trainer's arguments; ConfigurationError has a line per error in older ones."""
    older = {
        name: value
        for name, value in arguments.items()
        if name in TYPES and (value is not None or name == "gpus")
    }
    current = {name: value for name, value in arguments.items() if name not in TYPES}
    problems = Problems()
    for name in values.check(TYPES, older, problems):
        del older[name]
    translated = dict(current)
    for convert in (_strategy, _hardware, _renamed):
        with problems:
            translated |= convert(older, current)
    if (bits := shown(current.get("precision")).strip("'")) in _PRECISIONS:
        translated["precision"] = _PRECISIONS[bits]
    if (backend := older.get("amp_backend", "native")) != "native":
        # https://github.com/NVIDIA/apex/pull/1896
        problems.add(f"amp_backend={shown(backend)}: use 'native'; apex has no mixed precision")
    problems.raise_any()
    return translated


def keywords(call: str, taken: Collection[str], kwargs: _Values) -> dict[str, Any]:
    """Translate keywords of a method, whose arguments ``taken`` are given without a keyword."""
    translated, same = dict[str, Any](), _OF_LOG if call == "log" else dict.fromkeys(_KEYWORDS)
    for name, value in kwargs.items():
        now = name if (call, name) == ("fit", "ckpt_path") else _KEYWORDS.get(name, name)
        if name in same and value is same[name]:
            continue
        if now in translated or now in taken:
            raise ConfigurationError(f"{call}: {name}: {now} is given, too; give one of them")
        if now == name and (advice := instead("callbacks" if call[0].isupper() else "call", name)):
            raise ConfigurationError(f"{call}: {name}={_shown(value)}{advice}")
        translated[now] = value
    return translated


def _is_given(current: _Values, name: str) -> bool:
    return shown(current.get(name, "auto")) != "'auto'"


def _mode(current: _Values) -> str | None:
    """The strategy that ``accelerator`` names, as it once could."""
    value = current.get("accelerator")
    return value if isinstance(value, str) and value in _MODES else None


def _strategy(older: _Values, current: _Values) -> dict[str, Any]:
    mode, plugin = _mode(current), _plugin(older.get("plugins"))
    named = {} if mode is None else {"accelerator": mode}
    named |= {name: older[name] for name in ("plugins", "tpu_cores") if name in older}
    if not named:
        return {}
    if _is_given(current, "strategy"):
        named["strategy"] = current["strategy"]
    wanted = plugin.strategy if isinstance(plugin, Plugin) else plugin
    spawned = _SPAWNED.get(wanted) if isinstance(wanted, str) else None
    meanings = {
        ("accelerator",): mode,
        ("plugins",): wanted,
        ("tpu_cores",): "xla",
        ("accelerator", "plugins"): {"ddp": wanted, "ddp_spawn": spawned}.get(mode or ""),
    }
    strategy = meanings.get(tuple(named))
    if strategy is None:
        raise ConfigurationError(f"{_listed(named)} each name a strategy; give only strategy")
    if not isinstance(plugin, Plugin):
        return {"strategy": strategy}
    if options := current.get("strategy_options"):
        raise ConfigurationError(
            f"strategy_options={_shown(options)} and {_shown(plugin)} each set options of the "
            "strategy; give only one of them"
        )
    return plugin.current(strategy)


def _plugin(value: Any) -> Any:
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ConfigurationError(f"plugins={_shown(value)}: give one, or strategy in its place")
        value = value[0]
    return DeepSpeedPlugin() if isinstance(value, str) and value == "deepspeed" else value


def _hardware(older: _Values, current: _Values) -> dict[str, Any]:
    counts = {name: older[name] for name in ("gpus", "tpu_cores") if name in older}
    mode, accelerator = _mode(current), current.get("accelerator", "auto")
    if not counts:
        # accelerator="horovod" without GPUs was Horovod on CPUs.
        on_cpu = mode == "horovod" and not _is_given(current, "devices")
        return {} if mode is None else {"accelerator": "cpu" if on_cpu else "auto"}
    if _is_given(current, "devices"):
        counts["devices"] = current["devices"]
    if len(counts) > 1:
        raise ConfigurationError(f"{_listed(counts)} each select devices; give only devices")
    [(name, value)] = counts.items()
    kind, devices = _gpus(value) if name == "gpus" else ("tpu", _tpu_cores(value))
    same = {"gpu": ("gpu", "cuda")}.get(kind, (kind,))
    if accelerator in ("cpu", "gpu", "cuda", "tpu") and accelerator not in same:
        both = _listed({"accelerator": accelerator, name: value})
        raise ConfigurationError(f"{both} contradict each other; give accelerator and devices")
    is_kind = accelerator in ("auto", *_MODES)  # another one is left to who looks for it
    return {"accelerator": kind if is_kind else accelerator, "devices": devices}


def _gpus(value: Any) -> tuple[str, Any]:
    """The accelerator and the devices: ``3``: the first three; ``"3"``: GPU 3; ``0``: the CPU."""
    if value is None or value == 0:
        return "cpu", 1
    if not isinstance(value, str) or "," in value:
        return "gpu", value
    if not value.strip().removeprefix("-").isdecimal():
        raise ConfigurationError(f"gpus={shown(value)}: give a number, or indices")
    return "gpu", int(value) if int(value) < 0 else [int(value)]


def _tpu_cores(value: Any) -> Any:
    """The devices: ``8``: that many; ``[1]``: the first, because cores were counted from 1."""
    if isinstance(value, int) and value > 0:
        return value
    if isinstance(value, list) and len(value) == 1 and value[0] in range(1, 9):
        return [value[0] - 1]
    raise ConfigurationError(f"tpu_cores={shown(value)}: give how many, or one as [1] to [8]")


def _renamed(older: _Values, current: _Values) -> dict[str, Any]:
    translated, problems = dict[str, Any](), Problems()
    for name in older.keys() & _RENAMED:
        now, value = _RENAMED[name], older[name]
        if now in current:
            both = _listed({name: value, now: current[now]})
            problems.add(f"{both} are two spellings of one option; give only {now}")
        if name == "logger" and isinstance(value, bool):
            value = Options.loggers if value else ()
        elif name == "logger" and not isinstance(value, list | tuple):
            value = [value]
        translated[now] = os.fspath(value) if name == "resume_from_checkpoint" else value
    problems.raise_any()
    return translated


def _listed(arguments: _Values) -> str:
    return " and ".join(f"{name}={_shown(value)}" for name, value in arguments.items())


def _shown(value: Any) -> str:
    """A value as written; an object by its class."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return shown(value) if type(value).__module__ == "builtins" else type(value).__name__
