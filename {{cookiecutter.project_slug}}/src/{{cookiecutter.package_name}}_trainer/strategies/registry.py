"""All strategies by name: those that folders and files declare here, and the user's own.

It finds each file, and each folder's ``__init__.py``, that has a ``REGISTRATION``. Deleting a
folder removes its names; no other file has to change.
"""

import importlib
import pkgutil
from functools import partial

from ..arguments import class_paths, legacy, other_trainers
from ..arguments.plugin import Plugin
from ..errors import ConfigurationError, shown
from ..launch import cluster, devices
from .base import Strategy
from .registration import Entry, Registration, imported

# First in the help, because they need no package but torch.
_FIRST = ("replicated", "fsdp")

_ENTRIES: dict[str, Entry] = {}
_PLUGINS: dict[str, str] = {}
variables: list[str] = []
"""Environment variables that the folders read."""


def register(name: str, strategy: type[Strategy]) -> None:
    """Register a custom strategy, for ``Trainer(strategy=name)`` and the command line."""
    _ENTRIES[name] = Entry(strategy)


def names() -> list[str]:
    """All registered names."""
    return list(_ENTRIES)


def find(name: object) -> Entry:
    """The entry of a name or a class path.

    Raises:
        ConfigurationError: The name is unknown; the nearest names are suggested.
    """
    if not isinstance(name, str):
        given = getattr(name, "__name__", repr(name))
        raise ConfigurationError(
            f"strategy={given} is a class: create an instance, {given}(), or give its name"
        )
    if "." in name:
        return Entry(_imported(name))
    if name not in _ENTRIES:
        raise ConfigurationError(other_trainers.unknown("strategy", name, ["auto", *_ENTRIES]))
    return _ENTRIES[name]


def _imported(path: str) -> type[Strategy]:
    found = class_paths.imported(f"strategy={shown(path)}", path)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigurationError(
            f"strategy={path!r} is not a strategy; subclass {Strategy.__name__}"
        )
    return found


def plugin_names() -> list[str]:
    """Names of all plugin classes of older trainers."""
    return list(_PLUGINS)


def plugin(name: str) -> type[Plugin]:
    """The plugin class of a name in :func:`plugin_names`; imports it."""
    found: type[Plugin] = imported(_PLUGINS[name])
    return found


def discover(package: str, path: list[str]) -> None:
    """Add the strategies that the folders and files of a package declare.

    Args:
        package: Its ``__name__``.
        path: Its ``__path__``.
    """
    found = [module.name for module in pkgutil.iter_modules(path)]
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
    devices.ADDED.update(declared.accelerators)
    for name, added in declared.accelerators.items():
        legacy.STRATEGIES_ON[name] = added.strategy
        other_trainers.ACCELERATORS[added.strategy] = (
            f"is a strategy; give it as strategy={added.strategy!r}, with accelerator={name!r}"
        )
    for source in declared.cluster_sources:
        cluster.register(source)
    variables.extend(declared.variables)
    other_trainers.STRATEGIES.update(declared.other_names)
    legacy.MODES.update(declared.older_modes)
    legacy.SPAWNED.update(declared.spawned_plugins)
    _PLUGINS.update({name: f"{package}.{path}" for name, path in declared.plugins.items()})
    for value, name in declared.plugin_names.items():
        legacy.PLUGINS[value] = partial(_make_plugin, name)


def _make_plugin(name: str) -> Plugin:
    return plugin(name)()
