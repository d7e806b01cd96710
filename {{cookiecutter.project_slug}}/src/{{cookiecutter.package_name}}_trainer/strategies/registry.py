"""All strategies by name: those that folders and files declare here, and the user's own.

It finds each file, and each folder's ``__init__.py``, that has a ``REGISTRATION``. Deleting a
folder removes its names; no other file has to change.
"""

import importlib.resources
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigurationError, Problems, nearest, shown
from ..launch import cluster, devices
from ..options import class_paths, values
from .base import Strategy
from .limits import Launcher, Limits

_FIRST = ("replicated", "fsdp")  # first in the help, because they need no package but torch
_LONGEST_TIMEOUT = 365 * 24 * 3600  # a year: larger values overflow the nanoseconds of C++
_DECLARATION = "\nREGISTRATION = "  # of a file; one without it is imported when it is used


@dataclass(frozen=True)
class Entry:
    """A strategy's name in the registry: a class, or a class with a preset.

    Args:
        strategy: The class; or ``"module:Class"`` in the declaring folder, which is imported when
            the name is first used, so that a heavy engine costs nothing until then.
        summary: One line for the help; empty: the first paragraph of the class's docstring.
        preset: Options that the name sets.
        base: The name under which users can set these options.
        lacks: Options that it does not have (of others, older names), each with an alternative.
        launcher: How processes are started; ``None``: as the class' limits say.
        max_nodes: Largest number of nodes; ``None``: the limit of the class.
    """

    strategy: str | type[Strategy]
    summary: str = ""
    preset: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    launcher: Launcher | None = None
    max_nodes: int | None = None

    @property
    def cls(self) -> type[Strategy]:
        if not isinstance(self.strategy, str):
            return self.strategy
        module, _, name = self.strategy.partition(":")
        kind: type[Strategy] = getattr(importlib.import_module(module), name)
        return kind

    @property
    def limits(self) -> Limits:
        return self._limited(self.cls.limits)

    def make(self, options: Mapping[str, Any]) -> Strategy:
        make: Callable[..., Strategy] = self.cls
        made = make(**self.preset, **options)
        made.limits = self._limited(made.limits)
        return made

    def on_one_node(self, launcher: Launcher, summary: str) -> "Entry":
        """The same with processes that are started for one call of a program."""
        return replace(self, summary=summary, launcher=launcher, max_nodes=1)

    def _limited(self, limits: Limits) -> Limits:
        launcher, most = self.launcher or limits.launcher, self.max_nodes or limits.max_nodes
        return replace(limits, launcher=launcher, max_nodes=most)


@dataclass(frozen=True)
class Registration:
    """What a folder or file of ``strategies/`` adds to the trainer, in its ``REGISTRATION``.

    Args:
        strategies: Its strategies by name, in the order of the help.
        refused: Names of strategies that it had once, each with an alternative.
        accelerators: Accelerators of an engine by name.
        cluster_sources: Launchers of an engine, from which a process reads its rank.
        variables: Environment variables that an engine reads.
        lost_peer_errors: Names of an engine's exceptions that only report the loss of a peer.
    """

    strategies: Mapping[str, Entry]
    refused: Mapping[str, str] = field(default_factory=dict)
    accelerators: Mapping[str, devices.Hardware] = field(default_factory=dict)
    cluster_sources: Sequence[cluster.Source] = ()
    variables: Sequence[str] = ()
    lost_peer_errors: Sequence[str] = ()


_ENTRIES: dict[str, Entry] = {}
_REFUSED: dict[str, str] = {}
variables: list[str] = []  # of the environment, that the folders read
lost_peer_errors: list[str] = []  # names of engines' exceptions that only report the loss of a peer


def register(name: str, strategy: type[Strategy]) -> None:
    """Register a custom strategy, for ``Trainer(strategy=name)`` and the command line."""
    _ENTRIES[name] = Entry(strategy)


def names() -> list[str]:
    return list(_ENTRIES)


def find(name: object) -> Entry:
    """The entry of a name or a class path."""
    if isinstance(name, type):
        advice = f"create an instance, {name.__name__}(), or give its name"
        raise ConfigurationError(f"strategy={name.__name__} is a class: {advice}")
    if not isinstance(name, str):
        kinds = "a name, a class path, or a Strategy object"
        raise ConfigurationError(f"strategy={shown(name)}: give {kinds}")
    if "." in name:
        return Entry(class_paths.imported(f"strategy={shown(name)}", name, Strategy))
    if name not in _ENTRIES:
        instead = _REFUSED.get(name) or nearest(name, ["auto", *_ENTRIES], "strategy")
        raise ConfigurationError(f"strategy={shown(name)} is unknown{instead}")
    return _ENTRIES[name]


def options_of(cls: type[Strategy]) -> list[str]:
    """The options of a strategy; those of its base classes too, if it takes ``**options``."""
    options: list[str] = []
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(base).parameters.values())
            named = (p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
            options += named
            if all(p.kind != p.VAR_KEYWORD for p in parameters):
                break
    return options


def create(name: object, options: dict[str, Any]) -> Strategy:
    """Create a strategy by name or class path, with its own options."""
    entry = find(name)
    cls = entry.cls
    known, problems = options_of(cls), Problems()
    for option in (option for option in options if option not in known):
        hint = nearest(str(option), known) if known else "; it has none"
        hint = f": {entry.lacks[option]}" if option in entry.lacks else hint
        problems.add(f"strategy_options: {name} has no option {option!r}{hint}")
    expected: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        expected |= values.hints(base) if "__init__" in vars(base) else {}
    options = {option: value for option, value in options.items() if option in known}
    wrong = values.check(expected, options, problems, "strategy_options.")
    for option, value in options.items():
        if option not in wrong and isinstance(value, float) and not math.isfinite(value):
            problems.add(f"strategy_options.{option}={value!r}: expected a finite number")
            wrong.append(option)
    timeout = options.get("timeout_seconds", 1)
    if "timeout_seconds" not in wrong and not 0 < timeout <= _LONGEST_TIMEOUT:
        advice = f"give a number above 0, of at most {_LONGEST_TIMEOUT}"
        problems.add(f"strategy_options.timeout_seconds={shown(timeout)}: {advice}")
    for option in (option for option in entry.preset if option in options):
        advice = f"use strategy={entry.base!r} to choose it"
        problems.add(f"strategy_options.{option} is set by the strategy's name; {advice}")
    problems.raise_any()
    try:
        return entry.make(options)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise values.refused(f"strategy={name!r}", cls, options, error) from None


def discover(package: str, path: list[str]) -> None:
    """Add the strategies that the folders and files of a package declare."""
    folder = importlib.resources.files(package)  # also in a zip file
    modules = [
        info.name
        for info in pkgutil.iter_modules(path)
        if info.ispkg or _DECLARATION in (folder / f"{info.name}.py").read_text("utf-8")
    ]
    for name in sorted(modules, key=lambda name: [*_FIRST, name].index(name)):
        module = importlib.import_module(f"{package}.{name}")
        declared = getattr(module, "REGISTRATION", None)
        if isinstance(declared, Registration):
            _add(module.__name__, declared)


def _add(package: str, declared: Registration) -> None:
    for name, entry in declared.strategies.items():
        if name in _ENTRIES:
            raise RuntimeError(f"{package} declares strategy {name!r}, which exists already")
        named = isinstance(entry.strategy, str)
        _ENTRIES[name] = replace(entry, strategy=f"{package}.{entry.strategy}") if named else entry
    _REFUSED.update(declared.refused)
    devices.ENGINE_HARDWARE.update(declared.accelerators)
    cluster.SOURCES.extend(declared.cluster_sources)
    cluster.SOURCES.sort(key=lambda source: source.precedence)
    variables.extend(declared.variables)
    lost_peer_errors.extend(declared.lost_peer_errors)
