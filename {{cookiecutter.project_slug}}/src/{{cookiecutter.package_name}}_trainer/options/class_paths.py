"""Create objects that are given as instances, by name, or by class path."""

import importlib
import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import ConfigurationError, Problems, UserError, nearest, one_line, shorten, shown
from . import values

if TYPE_CHECKING:
    from .conversion import Argument

_KEYS = ("class_path", "init_args")
# Errors whose message says what they are.
_SPEAKING = (ImportError, AttributeError, SyntaxError, ValueError, OSError, UserError)
T = TypeVar("T")


@dataclass(frozen=True)
class Specified(Generic[T]):
    """A class and its checked arguments; errors name it by ``where``: ``"callbacks[0]"``."""

    where: str
    cls: type[T]
    class_path: str
    arguments: Mapping[str, "Argument"]

    def recorded(self) -> dict[str, Any]:
        """``class_path`` and ``init_args`` for YAML, with the defaults that it can express."""
        types = values.hints(self.cls)
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(self.cls).parameters.items()
            if type(parameter.default) in (bool, int, float, str, type(None))
            and (parameter.default is None or values.fits(types.get(name, Any), parameter.default))
        }
        init_args = {name: argument.value for name, argument in self.arguments.items()}
        return {"class_path": self.class_path, "init_args": defaults | init_args}

    def create(self) -> T:
        """Create the object; ConfigurationError if the class refuses its arguments."""
        try:
            return self.cls(**{name: arg.create() for name, arg in self.arguments.items()})
        except (Exception, SystemExit) as error:  # a user's constructor may raise anything
            init_args = {name: argument.value for name, argument in self.arguments.items()}
            raise values.refused(self.where, self.cls, init_args, error) from None


def create(where: str, value: object, base: type[T], built_in: Mapping[str, str]) -> T:
    """Return a given object, or create it as :func:`read` describes."""
    return value if isinstance(value, base) else read(where, value, base, built_in).create()


def read(where: str, value: object, base: type[T], built_in: Mapping[str, str]) -> Specified[T]:
    """Read a class path, a built-in name, or a dict with ``class_path`` and ``init_args``."""
    entry = {"class_path": value} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or not isinstance(path := entry.get("class_path"), str):
        kinds = f"a {base.__name__}, its class path, or class_path and init_args"
        raise ConfigurationError(f"{where}={shown(values.plain(value))}: give {kinds}")
    if unknown := sorted(map(str, entry.keys() - set(_KEYS))):
        raise ConfigurationError(f"{where} has no {unknown[0]!r}{nearest(unknown[0], _KEYS)}")
    path = str(path)
    named = f"{where}{'' if built_in else '.class_path'}={shown(path)}"
    if built_in and "." not in path and path not in built_in:
        kind, similar = base.__name__.lower(), nearest(path, built_in, "function")
        raise ConfigurationError(f"{named} is no built-in {kind} and no class path{similar}")
    cls = imported(named, built_in.get(path, path), base)
    arguments = entry.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        named = f"{where}.init_args={shown(values.plain(arguments))}"
        raise ConfigurationError(f"{named}: give them by name")
    return Specified(where, cls, path, _checked(where, cls, arguments))


def _checked(where: str, cls: type, arguments: Mapping[str, Any]) -> Mapping[str, "Argument"]:
    problems, converted = Problems(), dict[str, "Argument"]()
    if arguments:
        # Only now: it imports jsonargparse, for which a script without arguments has no use.
        from . import conversion

        converted = conversion.convert(where, cls, arguments, problems)
    for name, parameter in inspect.signature(cls).parameters.items():
        is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_one and parameter.default is parameter.empty and name not in arguments:
            problems.add(f"{where}.{name}: not given, and it has no default")
    problems.raise_any()
    return converted


def imported(where: str, path: str, base: type[T]) -> type[T]:
    """Import the subclass of ``base`` that a class path ``"module.Class"`` names."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"{where}: give its module too: module.{shorten(name)}")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        modules = (frame for frame in frames if frame.name == "<module>")
        user_frames = [frame for frame in modules if "site-packages" not in frame.filename]
        at = f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""
        kind = "" if isinstance(error, _SPEAKING) else f"{type(error).__name__}: "
        raise ConfigurationError(f"{where}: {kind}{one_line(error)}{at}") from None
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigurationError(f"{where} is not a {base.__name__}")
    return cls
