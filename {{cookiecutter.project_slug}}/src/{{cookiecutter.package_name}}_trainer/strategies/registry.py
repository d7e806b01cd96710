"""All strategies by name: those that folders and files declare here, and the user's own.

It finds each file, and each folder's ``__init__.py``, that has a ``REGISTRATION``. Deleting a
folder removes its names; no other file has to change.
"""

import importlib
import inspect
import math
import pkgutil
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, Problems, nearest, shown
from ..launch import cluster, devices
from ..options import class_paths, values
from .base import Strategy
from .registration import Entry, Registration

# First in the help, because they need no package but torch.
_FIRST = ("replicated", "fsdp")
# A year: larger values overflow the nanoseconds of C++.
_LONGEST_TIMEOUT = 365 * 24 * 3600
# Of a file; one without it is imported when it is used.
_DECLARATION = "\nREGISTRATION = "

_ENTRIES: dict[str, Entry] = {}
_REFUSED: dict[str, str] = {}
variables: list[str] = []
"""Environment variables that the folders read."""
lost_peer_errors: list[str] = []
"""Names of engines' exceptions that only report the loss of a peer."""


def register(name: str, strategy: type[Strategy]) -> None:
    """Register a custom strategy, for ``Trainer(strategy=name)`` and the command line."""
    _ENTRIES[name] = Entry(strategy)


def names() -> list[str]:
    """All registered names."""
    return list(_ENTRIES)


def find(name: object) -> Entry:
    """The entry of a name or a class path."""
    if isinstance(name, type):
        raise ConfigurationError(
            f"strategy={name.__name__} is a class: create an instance, {name.__name__}(), or give "
            "its name"
        )
    if not isinstance(name, str):
        raise ConfigurationError(
            f"strategy={shown(name)}: give a name, a class path, or a Strategy object"
        )
    if "." in name:
        return Entry(class_paths.imported(f"strategy={shown(name)}", name, Strategy))
    if name not in _ENTRIES:
        instead = _REFUSED.get(name) or nearest(name, ["auto", *_ENTRIES], "strategy")
        raise ConfigurationError(f"strategy={shown(name)} is unknown{instead}")
    return _ENTRIES[name]


def options_of(cls: type[Strategy]) -> list[str]:
    """The options of a strategy; those of its base classes too, if it takes ``**options``."""
    found: list[str] = []
    for each in cls.__mro__:
        if "__init__" in vars(each):
            parameters = list(inspect.signature(each).parameters.values())
            kinds = {parameter.kind for parameter in parameters}
            named = (p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
            found += named
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                break
    return found


def create(name: object, options: dict[str, Any]) -> Strategy:
    """Create a strategy by name or class path, with its own options."""
    entry = find(name)
    cls = entry.cls
    known = options_of(cls)
    problems = Problems()
    for option in (each for each in options if each not in known):
        hint = nearest(str(option), known) if known else "; it has none"
        hint = f": {entry.lacks[option]}" if option in entry.lacks else hint
        problems.add(f"strategy_options: {name} has no option {option!r}{hint}")
    expected: dict[str, Any] = {}
    for each in reversed(cls.__mro__):
        expected |= values.hints(each) if "__init__" in vars(each) else {}
    options = {option: value for option, value in options.items() if option in known}
    wrong = values.check(expected, options, problems, "strategy_options.")
    for option, value in options.items():
        if option not in wrong and isinstance(value, float) and not math.isfinite(value):
            problems.add(f"strategy_options.{option}={value!r}: expected a finite number")
            wrong.append(option)
    timeout = options.get("timeout_seconds", 1)
    if "timeout_seconds" not in wrong and not 0 < timeout <= _LONGEST_TIMEOUT:
        problems.add(
            f"strategy_options.timeout_seconds={shown(timeout)}: give a number above 0, of at most "
            f"{_LONGEST_TIMEOUT}"
        )
    for option in (each for each in entry.preset if each in options):
        problems.add(
            f"strategy_options.{option} is set by the strategy's name; use "
            f"strategy={entry.base!r} to choose it"
        )
    problems.raise_any()
    try:
        return entry.make(options)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise values.refused(f"strategy={name!r}", cls, options, error) from None


def discover(package: str, path: list[str]) -> None:
    """Add the strategies that the folders and files of a package declare."""
    folder = Path(path[0])
    found = [
        each.name
        for each in pkgutil.iter_modules(path)
        if each.ispkg or _DECLARATION in (folder / f"{each.name}.py").read_text("utf-8")
    ]
    last = len(_FIRST)
    for name in sorted(found, key=lambda each: _FIRST.index(each) if each in _FIRST else last):
        module = importlib.import_module(f"{package}.{name}")
        declared = getattr(module, "REGISTRATION", None)
        if isinstance(declared, Registration):
            _add(module.__name__, declared)


def _add(package: str, declared: Registration) -> None:
    for name, entry in declared.strategies.items():
        if name in _ENTRIES:
            raise RuntimeError(f"{package} declares strategy {name!r}, which exists already")
        _ENTRIES[name] = entry.below(package)
    _REFUSED.update(declared.refused)
    devices.ADDED.update(declared.accelerators)
    for source in declared.cluster_sources:
        cluster.register(source)
    variables.extend(declared.variables)
    lost_peer_errors.extend(declared.lost_peer_errors)
