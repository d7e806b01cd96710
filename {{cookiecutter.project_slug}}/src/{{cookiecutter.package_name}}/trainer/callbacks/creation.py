"""Create callbacks from class paths; all errors in them are reported at once."""

import importlib
from collections.abc import Mapping

from ..arguments import values
from ..errors import ConfigurationError, Problems, nearest, one_line, shown
from ..module import other_hooks, problems_of_signatures
from .base import Callback
from .built_in import BUILT_IN

_KEYS = ("class_path", "init_args")


def create(given: object, problems: Problems) -> tuple[Callback, ...]:
    """Create the callbacks of the trainer's argument.

    Args:
        given: A callback, or a list: callbacks, class paths, names of built-in callbacks, or dicts
            with ``class_path`` and ``init_args``.
        problems: Collects one line per error.
    """
    if isinstance(given, Callback):
        given = [given]
    if not isinstance(given, list | tuple):
        problems.add(f"callbacks={shown(given)}: give a list of callbacks, or of class paths")
        return ()
    made: list[Callback] = []
    for index, each in enumerate(given):
        with problems:
            callback = each if isinstance(each, Callback) else _create(f"callbacks[{index}]", each)
            lines = other_hooks.of_callback(type(callback), Callback)
            lines += problems_of_signatures(callback, Callback)
            if lines:
                raise ConfigurationError(lines)
            made.append(callback)
    return tuple(made)


def _create(where: str, given: object) -> Callback:
    entry = {"class_path": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_path"), str):
        raise ConfigurationError(
            f"{where}={shown(given)}: give a Callback, its class path, or class_path and init_args"
        )
    if unknown := sorted(map(str, entry.keys() - set(_KEYS))):
        raise ConfigurationError(f"{where} has no {unknown[0]!r}{nearest(unknown[0], _KEYS)}")
    cls = _find_class(where, entry["class_path"])
    arguments = entry.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        raise ConfigurationError(f"{where}.init_args={shown(arguments)}: give them by name")
    problems = Problems()
    good = values.check_arguments(where, cls, arguments, problems)
    problems.raise_any()
    try:
        return cls(**good)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise values.refused(where, cls, good, error) from None


def _find_class(where: str, path: str) -> type[Callback]:
    module, _, name = path.rpartition(".")
    if not module and name in BUILT_IN:
        return BUILT_IN[name]
    if not module:
        known = nearest(name, BUILT_IN)
        raise ConfigurationError(
            f"{where}={shown(path)} is no built-in callback and no class path{known}"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a user's module may raise anything
        raise ConfigurationError(f"{where}={shown(path)}: {one_line(error)}") from None
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise ConfigurationError(f"{where}={shown(path)} is not a Callback")
    return found
