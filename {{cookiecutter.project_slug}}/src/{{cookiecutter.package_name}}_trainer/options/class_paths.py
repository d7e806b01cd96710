"""Create objects that are given as instances, by name, or by class path."""

import importlib
import traceback
from collections.abc import Mapping
from typing import TypeVar

from ..errors import ConfigurationError, Problems, UserError, nearest, one_line, shorten, shown
from . import values

_KEYS = ("class_path", "init_args")
# Errors whose message says what they are.
_SPEAKING = (ImportError, AttributeError, SyntaxError, ValueError, OSError, UserError)
T = TypeVar("T")


def create(where: str, given: object, base: type[T], built_in: Mapping[str, str]) -> T:
    """Return a given object, or create it; ConfigurationError has one line per error.

    ``given`` may also be its class path, the name of a built-in one (``built_in`` has their class
    paths), or a dict with ``class_path`` and ``init_args``. ``where``: what errors name it by, such
    as ``"callbacks[0]"``.
    """
    if isinstance(given, base):
        return given
    entry = {"class_path": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or not isinstance(path := entry.get("class_path"), str):
        raise ConfigurationError(
            f"{where}={shown(given)}: give a {base.__name__}, its class path, or class_path and "
            "init_args"
        )
    if unknown := sorted(map(str, entry.keys() - set(_KEYS))):
        raise ConfigurationError(f"{where} has no {unknown[0]!r}{nearest(unknown[0], _KEYS)}")
    arguments = entry.get("init_args") or {}
    if "." not in path and path not in built_in:
        raise ConfigurationError(
            f"{where}={shown(path)} is no built-in {base.__name__.lower()} and no class path"
            f"{nearest(path, built_in)}"
        )
    cls = imported(f"{where}={shown(path)}", built_in.get(path, path), base)
    if not isinstance(arguments, Mapping):
        raise ConfigurationError(f"{where}.init_args={shown(arguments)}: give them by name")
    problems = Problems()
    good = values.check_arguments(where, cls, arguments, problems)
    problems.raise_any()
    try:
        return cls(**good)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise values.refused(where, cls, good, error) from None


def imported(where: str, path: str, base: type[T]) -> type[T]:
    """Import the subclass of ``base`` that a class path ``"module.Class"`` names.

    ConfigurationError, which begins with ``where``, has the line of the user's file that raised.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(f"{where}: give its module too: module.{shorten(name)}")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a user's module may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        modules = (each for each in frames if each.name == "<module>")
        own = [each for each in modules if "site-packages" not in each.filename]
        at = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        kind = "" if isinstance(error, _SPEAKING) else f"{type(error).__name__}: "
        raise ConfigurationError(f"{where}: {kind}{one_line(error)}{at}") from None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigurationError(f"{where} is not a {base.__name__}")
    return found
