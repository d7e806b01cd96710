"""From the keywords of ``Trainer`` to :class:`~.options.Options`.

The signature of ``Trainer.__init__`` is the one place that declares keywords, their types and
defaults; it is read here once.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import ConfigurationError, Problems
from . import legacy, max_time, other_trainers, paths, values
from .options import Options

# Paths, and what replaces those that cannot be expanded.
_PATHS = {"default_root_dir": ".", "resume": None, "weights": None}
# Replaces options that could not be translated, which already have their own lines.
_PLAIN = {"accelerator": "auto", "devices": "auto", "strategy": "auto", "precision": "32-true"}


@dataclass(frozen=True)
class Keywords:
    """The keywords of a call of ``Trainer``, older spellings included: by name, unchecked."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    types: Mapping[str, Any]


class _Takes(Protocol):
    def _configure(self, keywords: Keywords) -> None: ...


T = TypeVar("T", bound=_Takes)
P = ParamSpec("P")


def collects_keywords(
    declare: Callable[Concatenate[T, P], None],
) -> Callable[Concatenate[T, P], None]:
    """Decorate an ``__init__`` that only declares keywords: all are passed to ``_configure``.

    So the signature stays the only list of keywords, and a forgotten one cannot get lost.
    """
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(declare).parameters.items()
        if name != "self"
    }
    types = {
        name: each for name, each in typing.get_type_hints(declare).items() if name in defaults
    }

    def __init__(self: T, /, *arguments: P.args, **given: P.kwargs) -> None:
        _refuse_unknown(type(self).__name__, given, defaults, other_trainers.instead_of)
        declare(self, *arguments, **given)
        self._configure(Keywords({**defaults, **given}, defaults, types))

    return functools.update_wrapper(__init__, declare)


C = TypeVar("C", bound=type)


def explains_keywords(cls: C) -> C:
    """Decorate a class: an unknown keyword of a public method is one line with the known ones."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _explained(method))
    return cls


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    known = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def call(*arguments: Any, **given: Any) -> Any:
        _refuse_unknown(method.__qualname__, given, known, other_trainers.instead_of_keyword)
        return method(*arguments, **given)

    return call


def _refuse_unknown(
    owner: str, given: Iterable[str], known: Collection[str], suggest: values.Suggest
) -> None:
    lines = [
        f"{name}: {owner} has no such argument{suggest(name, known)}"
        for name in given
        if name not in known
    ]
    if lines:
        raise ConfigurationError(lines)


def read(keywords: Keywords, problems: Problems) -> Options:
    """Read options in their current spelling; a default replaces each invalid one.

    Args:
        keywords: The user's.
        problems: Collects one line per error.
    """
    # These have their own checks; older spellings are checked when they are translated.
    skip = {*legacy.ARGUMENTS, "activation_checkpointing", "callbacks", "loggers"}
    if isinstance(keywords.values["strategy"], type):
        skip.add("strategy")
    given = values.typed(keywords.values, keywords.defaults, keywords.types, problems, skip)
    try:
        given = legacy.translate(given)
    except ConfigurationError as error:
        problems.lines += error.problems
        given = _plain(given)
    seconds: float | None = None
    with problems:
        seconds = max_time.read(given["max_time"])
    short = int(given["fast_dev_run"])
    expanded = paths.expanded(given, _PATHS, problems)
    return Options(**expanded | {"max_time": seconds, "fast_dev_run": short})


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options to check if the translation failed: those that it does not change."""
    kept = {name: value for name, value in given.items() if name not in legacy.ARGUMENTS}
    accelerator = given["accelerator"]
    is_mode = isinstance(accelerator, str) and accelerator in legacy.MODES
    if not is_mode and other_trainers.about("accelerator", accelerator) is not None:
        return kept | _PLAIN | {"accelerator": accelerator}
    return kept | _PLAIN
