"""All strategies by name: those that folders and files declare here, and the user's own.

It finds each file, and each folder's ``__init__.py``, that has a ``REGISTRATION``. Deleting a
folder removes its names; no other file has to change.
"""

import importlib
import pkgutil

from ..errors import ConfigurationError, nearest, shown
from ..launch import cluster, devices
from ..options import class_paths
from .base import Strategy
from .registration import Entry, Registration

# First in the help, because they need no package but torch.
_FIRST = ("replicated", "fsdp")

_ENTRIES: dict[str, Entry] = {}
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
    """The entry of a name or a class path.

    Raises:
        ConfigurationError: The name is unknown; the nearest names are suggested.
    """
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
        raise ConfigurationError(
            f"strategy={shown(name)} is unknown{nearest(name, ['auto', *_ENTRIES])}"
        )
    return _ENTRIES[name]


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
    for source in declared.cluster_sources:
        cluster.register(source)
    variables.extend(declared.variables)
    lost_peer_errors.extend(declared.lost_peer_errors)
