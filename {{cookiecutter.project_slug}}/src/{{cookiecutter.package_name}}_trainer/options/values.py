"""Check the types of values: of a script, and those of a command line with jsonargparse.

Values of a script are not converted: ``"2"`` is a valid number on a command line, but not there.
"""

import functools
import inspect
import re
import traceback
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigurationError, Problems, nearest, one_line, shorten, shown
from . import redaction
from .numbers import BOUNDS

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

# The largest integer that torch, JSON and names of checkpoints support.
_LARGEST = 2**63 - 1

_WORDS = {getattr(each, "__name__", ""): bounds.words for each, bounds in BOUNDS.items()}
# Values that an option no longer has.
_REMOVED = {"rollback": "was removed; use 'stop' or 'skip', or resume from an earlier checkpoint"}


def hints(cls: type) -> dict[str, Any]:
    """Types of a class' constructor arguments; empty if one cannot be resolved."""
    try:
        found = typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    except Exception:  # a name that is imported only for type checkers
        return {}
    found.pop("return", None)
    return found


def check(
    expected: Mapping[str, Any], given: Mapping[str, Any], problems: Problems, prefix: str = ""
) -> list[str]:
    """Check values whose type is known, and return the names of the invalid ones."""
    wrong = [name for name, value in given.items() if not fits(expected.get(name, Any), value)]
    for name in wrong:
        problems.add(refusal(f"{prefix}{name}", given[name], expected[name]))
    return wrong


def refusal(name: str, value: Any, expected: Any) -> str:
    """Error line for a value of a wrong type, or one that was removed."""
    if isinstance(value, str) and value in _REMOVED:
        return f"{name}={value!r} {_REMOVED[value]}"
    wanted = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(expected))
    wanted = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", wanted)
    wanted = re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), wanted)
    if _is_too_large(value):
        wanted = "a number of at most 2**63 - 1"
    return f"{name}={_shown(name, value)}: expected {wanted}"


def _shown(name: str, value: Any) -> str:
    return redaction.HIDDEN if redaction.is_secret(name) else shown(redaction.value(value))


def fits(expected: Any, value: Any) -> bool:
    """Whether a value has a type, without conversion."""
    if expected is Any:
        return True
    if _is_too_large(value):
        return False
    if expected in BOUNDS:
        return BOUNDS[expected].fit(value)
    if expected in (int, float):
        return type(value) is int or (expected is float and isinstance(value, float))
    kind, items = typing.get_origin(expected) or expected, typing.get_args(expected)
    if kind in (typing.Union, types.UnionType):
        return any(fits(each, value) for each in items)
    if kind is Literal:
        return any(type(value) is type(each) and value == each for each in items)
    return _is_instance(value, kind) and (not items or _items_fit(kind, items, value))


def _is_instance(value: object, kind: Any) -> bool:
    if isinstance(value, str | bytes) or kind is None:  # a text is no sequence of options
        return value is None or kind in (type(value), object)
    try:
        return isinstance(value, (list, tuple) if kind in (list, tuple) else kind)
    except TypeError:  # a type that only type checkers know, such as a TypedDict
        return True


def _items_fit(kind: Any, expected: tuple[Any, ...], value: Any) -> bool:
    if isinstance(value, Mapping):
        key, item = expected
        return all(fits(key, each) and fits(item, value[each]) for each in value)
    if not isinstance(value, list | tuple):
        return True
    if kind is tuple and ... not in expected:
        return len(value) == len(expected) and all(map(fits, expected, value))
    return all(fits(expected[0], each) for each in value)


def convert(
    prefix: str,
    expected: Mapping[str, Any],
    given: Mapping[Any, Any],
    problems: Problems,
    known: Collection[str] | None = None,
) -> dict[str, Any]:
    """Convert values as on the command line, where ``"2"`` is a number, and return the valid ones.

    ``problems`` collects a line for each unknown name, with similar ones of ``known`` (default: of
    all), and for each invalid value.
    """
    good: dict[str, Any] = {}
    for name, value in given.items():
        if name not in expected:
            near = nearest(str(name), expected if known is None else known)
            problems.add(f"{prefix}{shorten(str(name))}: there is no such option{near}")
            continue
        try:
            good[name] = _converted(expected[name], value)
        except Exception:  # jsonargparse raises many types
            read = _converted(Any, value)  # 3 is shown as a number
            problems.add(refusal(f"{prefix}{name}", read, expected[name]))
    return good


def check_arguments(
    prefix: str, cls: type, given: Mapping[Any, Any], problems: Problems
) -> dict[str, Any]:
    """Convert the arguments of a class as on a command line, and return the valid ones.

    ``problems`` collects a line for each unknown, invalid or missing argument.
    """
    found, expected = hints(cls), dict[str, Any]()
    takes_any, missing = False, list[str]()
    for name, parameter in inspect.signature(cls).parameters.items():
        takes_any |= parameter.kind is parameter.VAR_KEYWORD
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        kind = found.get(name, Any)
        expected[name] = typing.Optional[kind] if parameter.default is None else kind  # noqa: UP045
        if parameter.default is parameter.empty and name not in given:
            missing.append(f"{prefix}.{name}: not given, and it has no default")
    passed_on = _passed_on(cls) if takes_any else {}
    if takes_any and passed_on.keys() <= expected.keys():  # it passes none on
        passed_on = dict.fromkeys(given, Any)
    good = convert(f"{prefix}.", {**passed_on, **expected}, given, problems)
    problems.lines += missing
    return good


def _passed_on(cls: type) -> dict[str, Any]:
    """Types of a class' arguments, with those that ``**arguments`` pass on to a parent class."""
    parser = _new_parser()
    try:
        parser.add_class_arguments(cls, as_group=False)
    except ValueError:  # a type that jsonargparse does not support
        return {}
    actions = {each.dest: getattr(each, "_typehint", Any) for each in parser._actions}
    return {name: kind for name, kind in actions.items() if name != "help"}


def refused(
    what: str, cls: type, given: Mapping[str, Any], error: BaseException
) -> ConfigurationError:
    """Error for a class, named by an option ``what``, whose constructor raised an exception."""
    if isinstance(error, ConfigurationError):
        return error
    arguments = ", ".join(f"{name}={_shown(name, value)}" for name, value in given.items())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == inspect.getfile(cls)]
    at = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return ConfigurationError(
        f"{what}: {cls.__name__}({arguments}) was refused: {kind}{one_line(error)}{at}"
    )


def _converted(expected: Any, value: Any) -> Any:
    if value is None and expected is not Any and not fits(expected, None):
        raise TypeError(type(value))
    found = _parser(expected).parse_object({"value": value}).as_dict()["value"]
    if _is_too_large(found):
        raise TypeError(type(value))
    return found


def _is_too_large(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > _LARGEST


@functools.cache
def register_types() -> None:
    """Have jsonargparse read numbers within bounds."""
    from jsonargparse.typing import register_type

    for kind, bounds in BOUNDS.items():
        register_type(kind, bounds.kind, bounds.read, type_check=_is_within)


def _is_within(value: object, kind: type) -> bool:
    return BOUNDS[kind].fit(value)


def _new_parser() -> "ArgumentParser":
    from jsonargparse import ArgumentParser  # a hundred modules, which a script does not need

    register_types()
    return ArgumentParser(exit_on_error=False)


@functools.cache
def _parser(expected: Any) -> "ArgumentParser":
    parser = _new_parser()
    parser.add_argument("--value", type=expected)
    return parser
