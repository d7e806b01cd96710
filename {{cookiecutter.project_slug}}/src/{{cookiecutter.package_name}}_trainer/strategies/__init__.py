"""How parameters, gradients and data are handled: one file per strategy, one folder per engine.

``base.py`` is the contract. Each folder declares its names in its ``__init__.py``, where
``registry.py`` finds them. It imports from ``memory/`` and the floors below.
"""

from . import registry
from .base import BatchSkipped, SingleDevice, Strategy
from .limits import Limits
from .registry import Entry, Registration, create, find, names, options_of, register

__all__ = [
    "BatchSkipped",
    "Entry",
    "Limits",
    "Registration",
    "SingleDevice",
    "Strategy",
    "create",
    "find",
    "names",
    "options_of",
    "register",
]

registry.discover(__name__, __path__)
