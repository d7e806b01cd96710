"""Whether values have the types that a signature asks for; jsonargparse says so.

The command line has its values checked by jsonargparse. Values that come from Python are checked by
it, too, and are not converted: ``"2"`` is text on a command line, but no number in Python.
"""

import functools
import inspect
import os
import re
import traceback
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from ..errors import ConfigurationError, Problems, one_line, shown
from . import redaction

# What torch, JSON and the file names of checkpoints can hold.
_LARGEST = 2**63 - 1
_NONE = type(None)


def hints(cls: type) -> dict[str, Any]:
    """Types of what a class is made with; of none if one of them cannot be resolved."""
    try:
        found = typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    except Exception:  # a name that is imported for type checkers only
        return {}
    found.pop("return", None)
    return found


def check(
    expected: Mapping[str, Any], given: Mapping[str, Any], problems: Problems, prefix: str = ""
) -> list[str]:
    """Check values against types.

    Args:
        expected: types by name; a value without one may be anything.
        given: values by name.
        problems: takes a line for each value of a wrong type.
        prefix: of names in these lines.

    Returns:
        names of the wrong values.
    """
    wrong = [name for name, value in given.items() if not fits(expected.get(name, Any), value)]
    for name in wrong:
        problems.add(refusal(f"{prefix}{name}", given[name], expected[name]))
    return wrong


def typed(
    given: dict[str, Any],
    defaults: Mapping[str, Any],
    expected: Mapping[str, Any],
    problems: Problems,
    skip: Collection[str] = (),
) -> dict[str, Any]:
    """Values with defaults in the place of those of a wrong type; defaults are not checked.

    Args:
        given: values by name.
        defaults: by name.
        expected: types by name.
        problems: takes a line for each value of a wrong type.
        skip: names of values that are not checked.
    """
    changed = {
        name: value
        for name, value in given.items()
        if value is not defaults[name] and name not in skip
    }
    wrong = check(expected, changed, problems)
    return given | {name: defaults[name] for name in wrong}


def refusal(name: str, value: Any, expected: Any) -> str:
    """The line for a value of a wrong type."""
    told = _told(name, value)
    if _is_too_large(value):
        return f"{name}={told}: expected a number of at most 2**63 - 1"
    wanted = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(expected))
    return f"{name}={told}: expected {wanted}"


def _told(name: str, value: Any) -> str:
    """A value as an error shows it."""
    return redaction.HIDDEN if redaction.is_secret(name) else shown(redaction.value(value))


def fits(expected: Any, value: Any) -> bool:
    """Whether a value is of a type, without being converted."""
    if expected is Any:
        return True
    if value is None:  # which jsonargparse takes for "not given"
        return _NONE in typing.get_args(expected)
    if _is_too_large(value):
        return False
    if isinstance(value, os.PathLike):
        return any(typing.get_origin(each) is os.PathLike for each in typing.get_args(expected))
    try:
        return _is_same(value, _parser(expected).parse_object({"value": value})["value"])
    except Exception:  # whatever jsonargparse, or the value itself, finds wrong
        return False


def converted(expected: Any, value: Any, default: Any = None) -> Any:
    """A value as the command line takes it: text of a number is that number.

    Args:
        expected: its type.
        value: from the command line, or from a file.
        default: what it is where it is not given, and may be in any case.

    Raises:
        Exception: it is not of that type.
    """
    if expected is Any or value is default:
        return value
    if _is_too_large(value) or (value is None and not fits(expected, None)):
        raise TypeError(type(value))
    return _parser(expected).parse_object({"value": value})["value"]


def may_be_given(cls: type, name: str, value: Any) -> bool:
    """Whether a class takes a value, of which only ``None`` may still be of a wrong type."""
    if value is not None:
        return True
    parameter = inspect.signature(cls).parameters.get(name)
    return parameter is None or parameter.default is None or fits(_hint(cls, name), None)


def refused(
    what: str, cls: type, given: Mapping[str, Any], error: BaseException
) -> ConfigurationError:
    """The error of a class that does not take its arguments.

    Args:
        what: section or option that names the class.
        cls: that was to be made.
        given: its arguments that the user gave.
        error: that it raised.
    """
    if isinstance(error, ConfigurationError):
        return error
    known = inspect.signature(cls).parameters
    defaults = {name: each.default for name, each in known.items()}
    chosen = {name: value for name, value in given.items() if value is not defaults.get(name)}
    arguments = ", ".join(f"{name}={_told(name, value)}" for name, value in chosen.items())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == inspect.getfile(cls)]
    at = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return ConfigurationError(
        f"{what}: {cls.__name__}({arguments}) was refused: {kind}{one_line(error)}{at}"
    )


def _hint(cls: type, name: str) -> Any:
    return hints(cls).get(name, Any)


def _is_too_large(value: Any) -> bool:
    return type(value) is int and abs(value) > _LARGEST


def _is_same(value: Any, found: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(found, list | tuple):
        pairs = zip(value, found, strict=True)
        return all(_is_same(own, other) for own, other in pairs)
    if type(value) is int and type(found) is float:
        return True
    return value is found or (type(value) is type(found) and bool(value == found))


@functools.cache
def _parser(expected: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=expected)
    return parser
