"""From the keywords of ``Trainer`` to :class:`~.options.Options`.

The signature of ``Trainer.__init__`` is the one place that declares keywords, their types and
defaults; it is read here once.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import ConfigurationError, Problems
from . import legacy, other_trainers, paths, values
from .options import Options

# Paths, and what is checked in their place where they cannot be.
_PATHS = {"default_root_dir": ".", "resume": None}
# Checked in the place of what could not be translated, which has its own line already.
_PLAIN = {"accelerator": "auto", "devices": "auto", "strategy": "auto", "precision": "32-true"}


@dataclass(frozen=True)
class Keywords:
    """What a user calls ``Trainer`` with, older spellings included: by name, unchecked."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    types: Mapping[str, Any]


class _Takes(Protocol):
    def _take(self, keywords: Keywords) -> None: ...


T = TypeVar("T", bound=_Takes)
P = ParamSpec("P")


def collected(
    declare: Callable[Concatenate[T, P], None],
) -> Callable[Concatenate[T, P], None]:
    """Have an ``__init__`` that only declares keywords hand all of them to ``_take``."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(declare).parameters.items()
        if name != "self"
    }
    types = {
        name: each for name, each in typing.get_type_hints(declare).items() if name in defaults
    }

    def __init__(self: T, /, *arguments: P.args, **given: P.kwargs) -> None:
        declare(self, *arguments, **given)  # Python itself refuses a keyword that there is not
        self._take(Keywords({**defaults, **given}, defaults, types))

    return functools.update_wrapper(__init__, declare)


def read(keywords: Keywords, problems: Problems, *, takes_tpus: bool) -> Options:
    """Options in today's spelling, with defaults in the place of what is wrong.

    Args:
        keywords: as the user gave them.
        problems: takes a line for each mistake.
        takes_tpus: whether there is a strategy for TPUs.
    """
    # These have checks of their own: the older ones where they are translated.
    skip = {*legacy.ARGUMENTS, "activation_checkpointing"}
    if isinstance(keywords.values["strategy"], type):
        skip.add("strategy")
    given = values.typed(keywords.values, keywords.defaults, keywords.types, problems, skip)
    try:
        given = legacy.translate(given, takes_tpus=takes_tpus)
    except ConfigurationError as error:
        problems.lines += error.problems
        given = _plain(given)
    return Options(**paths.expanded(given, _PATHS, problems))


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is checked of keywords that cannot be translated: those that are not in doubt."""
    kept = {name: value for name, value in given.items() if name not in legacy.ARGUMENTS}
    accelerator = given["accelerator"]
    if other_trainers.about("accelerator", accelerator) is not None:
        return kept | _PLAIN | {"accelerator": accelerator}
    return kept | _PLAIN
