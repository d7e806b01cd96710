"""From the keywords of ``Trainer`` to :class:`~.fields.Options`."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import Problems, nearest, shown
from . import paths, values
from .fields import Options
from .numbers import plain_number

_PATHS = ("default_root_dir", "resume", "weights")
# Have checks of their own.
_CHECKED_LATER = ("activation_checkpointing", "callbacks", "loggers")
_OFF_IN_SHORT_RUNS = (
    *("max_steps", "max_time", "overfit_batches", "check_val_every_n_epoch", "resume"),
    *("val_every_n_steps", "checkpoint_every_n_steps", "checkpoint_every_n_epochs"),
    *("keep_checkpoints", "async_checkpoints", "run_name", "overwrite"),
)
# Of other trainers, whose names are like those of options that mean something else, and removed.
_INSTEAD = {
    "num_processes": "; use devices",
    "distributed_backend": "; use strategy",
    "activation_checkpointing_mode": "; parts in activation_checkpointing are recomputed whole",
    "float8": "; call torchao's convert_to_float8_training in __init__ of the module",
}
_TRANSLATED = ("accelerator", "devices", "strategy", "precision")

T = TypeVar("T")
P = ParamSpec("P")


# Other values of these may be older spellings, and so are unknown names.
_TODAY = {
    "accelerator": ("auto", "cpu", "gpu", "cuda"),
    "precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"),
}


@dataclass
class Older:
    """Older spellings of keywords: none, until ``legacy/`` is imported, which adds its own."""

    types: Mapping[str, Any] = field(default_factory=dict)
    translate: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    load: Callable[[], object] = bool
    """Imports them, if they are there."""


older = Older()


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[T, Options, Problems], None]], Callable[Concatenate[T, P], None]]:
    """Decorate an ``__init__`` whose keywords are the fields of :class:`Options`.

    It receives the options, with the default in place of each invalid one, and the problems found.
    """
    declared = inspect.signature(options)

    def decorate(
        init: Callable[[T, Options, Problems], None],
    ) -> Callable[Concatenate[T, P], None]:
        @functools.wraps(init)
        def __init__(self: T, /, *arguments: P.args, **given: P.kwargs) -> None:
            declared.bind_partial(*arguments)
            problems = Problems()
            init(self, read(given, problems), problems)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [own, *declared.parameters.values()]
        __init__.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
        return __init__

    return decorate


def read(given: Mapping[str, Any], problems: Problems) -> Options:
    """Read the user's keywords in any spelling; a default replaces each invalid one."""
    defaults = {each.name: each.default for each in fields(Options)}
    given = {name: plain_number(value) for name, value in given.items()}
    if given.keys() - defaults or any(_is_other(name, given[name]) for name in given):
        older.load()
    known = {*defaults, *older.types}
    for name in given:
        if name not in known:
            instead = _INSTEAD.get(name) or nearest(name, defaults)
            problems.add(f"{name}: Trainer has no such argument{instead}")
    given = {name: value for name, value in given.items() if name in known}
    # After an error, those that are not translated.
    found = {name: given[name] for name in given if name in defaults and name not in _TRANSLATED}
    with problems:
        found = older.translate(given)
    changed = {
        name: value
        for name, value in found.items()
        if value is not defaults[name] and name not in _CHECKED_LATER
    }
    for name in values.check(values.hints(Options), changed, problems):
        del found[name]
    for name in _PATHS:
        if isinstance(path := found.pop(name, None), str | os.PathLike):
            with problems:
                found[name] = paths.expand(name, path)
    return Options(**found)


def _is_other(name: str, value: object) -> bool:
    """Whether a value is none of today's spellings, of an option that had others."""
    return name in _TODAY and not (isinstance(value, str) and value in _TODAY[name])


def shortened(options: Options, problems: Problems) -> tuple[Options, list[str]]:
    """Options of a run, which ``fast_dev_run`` makes short, and what to print of that."""
    number = int(options.fast_dev_run)
    if not number:
        return options, []
    if options.overfit_batches:
        problems.add(
            f"fast_dev_run={number} and overfit_batches={options.overfit_batches!r} each select "
            "batches; give only one of them"
        )
    limits = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")
    short: dict[str, Any] = {
        **dict.fromkeys(limits, number),
        **{name: getattr(Options, name) for name in _OFF_IN_SHORT_RUNS},
        "max_epochs": 1,
        "limit_train_batches": number * options.accumulate_grad_batches,
        "sanity_check": 0,
        "loggers": (),
    }
    replaced = [
        f"{name}={shown(value)}"
        for name in short.keys() - {"loggers"}
        if (value := getattr(options, name)) not in (short[name], getattr(Options, name))
    ]
    es = "" if number == 1 else "es"
    line = (
        f"fast_dev_run={number}: {number} optimizer step{es[1:]}, and {number} batch{es} of "
        "validation, test or prediction; no checkpoints, no loggers"
    )
    used = f"{line}; not used: {', '.join(sorted(replaced))}" if replaced else line
    return replace(options, **short), [used]
