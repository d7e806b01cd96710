"""Convert the arguments of a class to their types, and create the objects that they describe.

jsonargparse does that, one argument after the other, so that each error is found. It would read
every string as YAML again, and make a number of a file's string ``"007"``: see _Verbatim.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

from jsonargparse import ArgumentParser, Namespace

from ..errors import ConfigurationError, Problems
from . import values

_REASON = re.compile(  # what jsonargparse says of a class, dataclass or callable argument
    r"(Problem with given|expects a function|does not accept|(?<=\")value\.).*?(?=\. Got|\n *- |$)",
    re.DOTALL,
)


class _Verbatim(str):
    """A string that jsonargparse does not read as YAML, because it takes it for a blank one."""

    def strip(self, characters: str | None = None, /) -> str:
        return ""


class Argument(NamedTuple):
    value: Any  # as YAML
    create: Callable[[], Any]  # returns the value, with the objects that it describes


def convert(
    prefix: str, cls: type, arguments: Mapping[Any, Any], problems: Problems
) -> dict[str, Argument]:
    """Convert arguments of a class; ``problems`` has a line for each unknown or invalid one."""
    known, takes_others = parameters(cls)
    known = dict.fromkeys(arguments, (Any, None)) | known if takes_others else known
    return values.convert(f"{prefix}.", known, arguments, problems, _parse)


def parameters(cls: type) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """Types and defaults of a class' arguments, and whether it takes, and uses, any other."""
    own, takes_any = _declared(cls)
    passed_on = _passed_on(cls) if takes_any else {}
    return passed_on | own, takes_any and passed_on.keys() <= own.keys()


def _declared(cls: type) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """Types and defaults in the signature of a class, and whether it has ``**arguments``."""
    declared, types, takes_any = dict[str, tuple[Any, Any]](), values.hints(cls), False
    for name, parameter in inspect.signature(cls).parameters.items():
        takes_any |= parameter.kind is parameter.VAR_KEYWORD
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            kind = types.get(name, Any)
            kind = Optional[kind] if parameter.default is None else kind  # noqa: UP045
            declared[name] = (kind, parameter.default)
    return declared, takes_any


def _passed_on(cls: type) -> dict[str, tuple[Any, Any]]:
    """The arguments of a class, with those that ``**arguments`` pass on to a parent class."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(cls, as_group=False)
    except ValueError:  # a type that jsonargparse does not support
        return {}
    actions = (action for action in parser._actions if action.dest != "help")
    known = {action.dest: (getattr(action, "_typehint", Any), action.default) for action in actions}
    for base in reversed(cls.__mro__[1:-1]):  # of a dataclass, jsonargparse knows the fields only
        declared = _declared(base)[0] if inspect.isfunction(vars(base).get("__init__")) else {}
        known |= {name: declared[name] for name in declared if name in known}
    return known


def _parse(name: str, parameter: tuple[Any, Any], value: Any) -> Argument:
    kind, default = parameter
    parser = ArgumentParser(exit_on_error=False)
    # jsonargparse merges fields with those of the default.
    fields = default if is_dataclass(default) and not isinstance(default, type) else None
    parser.add_argument("--value", type=kind, default=fields)
    reason, readings = "", values.readings(kind, value)
    for reading in readings:
        # For jsonargparse, None means "not given".
        if values.is_too_large(reading) or (reading is None and not values.fits(kind, None)):
            continue
        try:
            parsed = parser.parse_object({"value": _verbatim(reading)})
        except Exception as error:  # jsonargparse, or a class that it imports, may raise anything
            said = _REASON.search(str(error))
            reason = reason or (" ".join(said[0].split()) if said else "")
        else:
            return Argument(reading, partial(_create, parser, parsed))
    raise ConfigurationError(values.refusal(name, readings[0], kind, reason))


def _create(parser: ArgumentParser, parsed: Namespace) -> Any:
    try:
        made = parser.instantiate(parsed, instantiators=[(_construct, object, True)])
    except ValueError as error:  # of a union, after all of its types
        raise error.__cause__ or error from None
    return _restored(made["value"])


def _construct(cls: type, *arguments: Any, **options: Any) -> Any:
    return cls(*map(_restored, arguments), **_restored(options))


def _verbatim(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _verbatim(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_verbatim(item) for item in value]
    return _Verbatim(value) if isinstance(value, str) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((key, _restored(item)) for key, item in value.items())
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(_restored, value))
    if isinstance(value, Path):
        return Path(values.expand_path("path", value))
    return str(value) if isinstance(value, _Verbatim) else value
