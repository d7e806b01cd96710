"""Check the types of options. Only text of the command line and files is converted to a type.

Scripts import this. jsonargparse, which converts arguments of classes, is as large as the trainer,
and only :mod:`.conversion` imports it.
"""

import enum
import errno
import inspect
import math
import os
import re
import traceback
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ..errors import ConfigurationError, Problems, nearest, one_line, shorten, shown
from . import redaction

_LARGEST = 2**63 - 1  # the largest integer that torch, JSON and names of checkpoints support
V = TypeVar("V")
W = TypeVar("W")


@dataclass(frozen=True)
class Range:
    text: str
    contains: Callable[[float], bool]

    def __repr__(self) -> str:
        return self.text


AtLeastTwo = Annotated[int, Range(">= 2", lambda value: value >= 2)]
NonNegativeInt = Annotated[int, Range(">= 0", lambda value: value >= 0)]
PositiveInt = Annotated[int, Range(">= 1", lambda value: value >= 1)]
PositiveNumber = Annotated[float, Range("> 0", lambda value: 0 < value < math.inf)]


class Text(str):
    """Unparsed text: its option's type decides whether ``5`` is a number or a name.

    All values of a command line, and in files numbers such as ``1e-3``, which YAML 1.1 reads as
    text. Other strings of files are strings, whatever they look like.
    """

    meaning: Any  # what it is if the type does not decide

    def __new__(cls, text: str, meaning: Any) -> "Text":
        made = super().__new__(cls, text)
        made.meaning = meaning
        return made


def plain(value: Any, read: Callable[[Text], Any] = lambda text: text.meaning) -> Any:
    """A value with what ``read`` makes of each text in it: its meaning."""
    if isinstance(value, Text):
        return read(value)
    if isinstance(value, dict):
        return {plain(key, str): plain(value[key], read) for key in value}
    return [plain(item, read) for item in value] if isinstance(value, list) else value


def plain_number(value: Any) -> Any:
    """A number of NumPy, also in an array without dimensions, as Python's own; else the value."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    kinds = (kind for kind in (bool, int, float) if isinstance(value, kind))
    return value if (kind := next(kinds, None)) is None else kind(value)


def _integer(text: Text) -> Any:
    """The meaning of a text; of ``1e3``, which may be a number of steps, an integer."""
    number = text.meaning  # exact below 2**53
    is_integer = isinstance(number, float) and number.is_integer() and abs(number) < 2**53
    return int(number) if is_integer and "." not in text else number


def readings(expected: Any, value: Any) -> list[Any]:
    """What a value may mean: its type takes the first that it can."""
    if expected is str:
        return [plain(value, str)]
    meaning = plain(value)
    flag = [bool(meaning)] if type(meaning) is int and meaning in (0, 1) else []
    return [meaning, plain(value, _integer), plain(value, str), *flag]


def hints(cls: type) -> dict[str, Any]:
    """Types of a class' constructor arguments; empty if one cannot be resolved."""
    try:
        types = typing.get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    except Exception:  # a name that is imported only for type checkers
        return {}
    types.pop("return", None)
    return types


def check(
    expected: Mapping[str, Any], values: Mapping[str, Any], problems: Problems, prefix: str = ""
) -> list[str]:
    """Check values whose type is known, and return the names of the invalid ones."""
    wrong = [name for name, value in values.items() if not fits(expected.get(name, Any), value)]
    for name in wrong:
        problems.add(refusal(f"{prefix}{name}", values[name], expected[name]))
    return wrong


def convert(
    prefix: str,
    expected: Mapping[str, V],
    values: Mapping[Any, Any],
    problems: Problems,
    read: Callable[[str, V, Any], W],
    known: Collection[str] | None = None,
) -> dict[str, W]:
    """Convert values by ``read``, which raises ConfigurationError, and return the valid ones.

    ``problems`` gets a line for each unknown name, with similar ones of ``known``, or of all.
    """
    good: dict[str, W] = {}
    for name, value in values.items():
        if name not in expected:
            line = f"{prefix}{shorten(str(name))}: there is no such option"
            names = expected if known is None else known
            kind = "argument" if prefix == "trainer." else prefix.partition("[")[0]
            problems.add(f"{line}{nearest(str(name), names, kind)}")
            continue
        with problems:
            good[name] = read(f"{prefix}{name}", expected[name], value)
    return good


def fitting(name: str, expected: Any, value: Any) -> Any:
    """The first meaning of a value that fits its type; ConfigurationError without one."""
    meanings = readings(expected, value)
    for meaning in meanings:
        if fits(expected, meaning):
            return meaning
    raise ConfigurationError(refusal(name, meanings[0], expected))


def refusal(name: str, value: Any, expected: Any, reason: str = "") -> str:
    """Error line for a value of a wrong type."""
    wanted = "a number of at most 2**63 - 1" if is_too_large(value) else type_name(expected)
    return f"{name}={given_as(name, value)}: expected {wanted}{reason and f' ({reason})'}"


def type_name(expected: Any) -> str:
    """A type as it is written in code, without the modules of its parts."""
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return " | ".join(map(type_name, typing.get_args(expected)))
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return f"{expected.__name__} ({', '.join(expected.__members__)})"
    name = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(expected))
    name = re.sub(r"Annotated\[(\w+), ([^\]]*)\]", r"\1 \2", name)
    return "None" if name == "NoneType" else name


def given_as(name: str, value: Any) -> str:
    """A value for an error line, without secrets."""
    return redaction.HIDDEN if redaction.is_secret(name) else shown(redaction.value(value))


def is_too_large(value: Any) -> bool:
    """Whether a value is an integer that torch and JSON do not support."""
    return isinstance(value, int) and not -_LARGEST - 1 <= value <= _LARGEST


def fits(expected: Any, value: Any) -> bool:
    """Whether a value has a type, without conversion; an integer is a ``float``, too."""
    kind, arguments = typing.get_origin(expected) or expected, typing.get_args(expected)
    if expected is Any:
        return True
    if value is None:
        return any(option in (None, type(None), object) for option in (expected, *arguments))
    if kind in (typing.Union, types.UnionType):
        return any(fits(option, value) for option in arguments)
    if kind is typing.Annotated:
        return fits(arguments[0], value) and bool(arguments[1].contains(value))
    if kind is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if kind in (int, float):
        is_number = isinstance(value, int if kind is int else int | float)
        return is_number and not isinstance(value, bool) and not is_too_large(value)
    try:
        is_text = isinstance(value, str | bytes) and not issubclass(kind, str | bytes)
        # A text is a Sequence, too.
        return isinstance(value, kind) and not is_text and _items_fit(arguments, value)
    except TypeError:  # a type that only type checkers know, such as a TypedDict
        return False


def _items_fit(types_of_items: tuple[Any, ...], value: Any) -> bool:
    if isinstance(value, Mapping):
        keys, items = types_of_items or (Any, Any)
        return all(fits(keys, key) and fits(items, value[key]) for key in value)
    if isinstance(value, list | tuple) and types_of_items:
        return all(fits(types_of_items[0], item) for item in value)
    return True


def refused(
    option: str, cls: type, kwargs: Mapping[str, Any], error: BaseException
) -> ConfigurationError:
    """Error for a class, named by ``option``, whose constructor raised an exception."""
    if isinstance(error, ConfigurationError):
        return error
    arguments = ", ".join(f"{name}={given_as(name, value)}" for name, value in kwargs.items())
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == inspect.getfile(cls)]
    at = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    reason = f"{kind}{one_line(error)}{at}"
    return ConfigurationError(f"{option}: {cls.__name__}({arguments}) was refused: {reason}")


def expand_path(name: str, value: str | os.PathLike[str]) -> str:
    """Expand ``~`` and variables in a path; ConfigurationError, with its option, if invalid.

    What exists in a folder such as ``a$b`` is meant as it is.
    """
    text = os.fspath(value)
    if text[:1] != "~" and os.path.lexists(text):
        return text
    text = os.path.expandvars(text)
    expanded = os.path.expanduser(text)  # noqa: PTH111 (Path raises if there is no such user)
    line = "" if expanded else "give a path"
    if unset := re.match(r".*\$(\w+|\{[^}]*\})", text, re.DOTALL):
        line = f"the variable {unset[1].strip('{}')} is not set; set it, or write the path"
    elif expanded.startswith("~"):
        user = expanded.partition("/")[0]
        line = f"there is no home directory of {user}; write ./{user} for a folder of that name"
    try:
        Path(expanded).lstat()
    except (OSError, ValueError) as error:  # a null byte
        # Of others, what reads or writes it says so.
        if getattr(error, "errno", errno.ELOOP) in (errno.ELOOP, errno.ENAMETOOLONG):
            line = line or one_line(error)
    if line:
        raise ConfigurationError(f"{name}={shown(value)}: {line}")
    return expanded
