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
    """A class and its arguments, checked, to create an object of it.

    ``where``: what errors name it by, such as ``"callbacks[0]"``.
    """

    where: str
    cls: type[T]
    class_path: str
    arguments: Mapping[str, "Argument"]

    def recorded(self) -> dict[str, Any]:
        """As a configuration has it: with the arguments, and the defaults that YAML can express."""
        found = values.hints(self.cls)
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(self.cls).parameters.items()
            if type(parameter.default) in (bool, int, float, str, type(None))
            and (parameter.default is None or values.fits(found.get(name, Any), parameter.default))
        }
        given = {name: argument.given for name, argument in self.arguments.items()}
        return {"class_path": self.class_path, "init_args": defaults | given}

    def create(self) -> T:
        """Create the object; ConfigurationError if the class refuses its arguments."""
        try:
            return self.cls(**{name: each.create() for name, each in self.arguments.items()})
        except (Exception, SystemExit) as error:  # a user's constructor may raise anything
            given = {name: argument.given for name, argument in self.arguments.items()}
            raise values.refused(self.where, self.cls, given, error) from None


def create(where: str, given: object, base: type[T], built_in: Mapping[str, str]) -> T:
    """Return a given object, or create it as :func:`read` describes."""
    return given if isinstance(given, base) else read(where, given, base, built_in).create()


def read(where: str, given: object, base: type[T], built_in: Mapping[str, str]) -> Specified[T]:
    """Read a class path, a built-in name, or a dict with ``class_path`` and ``init_args``."""
    entry = {"class_path": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or not isinstance(path := entry.get("class_path"), str):
        raise ConfigurationError(
            f"{where}={shown(values.plain(given))}: give a {base.__name__}, its class path, or "
            "class_path and init_args"
        )
    if unknown := sorted(map(str, entry.keys() - set(_KEYS))):
        raise ConfigurationError(f"{where} has no {unknown[0]!r}{nearest(unknown[0], _KEYS)}")
    path = str(path)
    named = f"{where}{'' if built_in else '.class_path'}={shown(path)}"
    if built_in and "." not in path and path not in built_in:
        raise ConfigurationError(
            f"{named} is no built-in {base.__name__.lower()} and no class path"
            f"{nearest(path, built_in, 'function')}"
        )
    cls = imported(named, built_in.get(path, path), base)
    arguments = entry.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        given = shown(values.plain(arguments))
        raise ConfigurationError(f"{where}.init_args={given}: give them by name")
    return Specified(where, cls, path, _checked(where, cls, arguments))


def _checked(where: str, cls: type, given: Mapping[str, Any]) -> Mapping[str, "Argument"]:
    problems, found = Problems(), dict[str, "Argument"]()
    if given:
        # Only now: it imports jsonargparse, for which a script without arguments has no use.
        from . import conversion

        found = conversion.convert(where, cls, given, problems)
    for name, parameter in inspect.signature(cls).parameters.items():
        is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_one and parameter.default is parameter.empty and name not in given:
            problems.add(f"{where}.{name}: not given, and it has no default")
    problems.raise_any()
    return found


def imported(where: str, path: str, base: type[T]) -> type[T]:
    """Import the subclass of ``base`` that a class path ``"module.Class"`` names."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"{where}: give its module too: module.{shorten(name)}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        modules = (frame for frame in frames if frame.name == "<module>")
        own = [each for each in modules if "site-packages" not in each.filename]
        at = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        kind = "" if isinstance(error, _SPEAKING) else f"{type(error).__name__}: "
        raise ConfigurationError(f"{where}: {kind}{one_line(error)}{at}") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigurationError(f"{where} is not a {base.__name__}")
    return found
