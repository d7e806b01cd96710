"""Callbacks: hooks called at fixed points of a fit, in addition to the module's.

The files of built-in ones are imported when they are used. Imports ``module``, ``checkpoint`` and
the folders below them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import instead
from .callback import Callback
from .calls import BUILT_IN

if TYPE_CHECKING:
    from .measuring import Profile, SystemMonitor
    from .monitored import BestCheckpoint, EarlyStopping
    from .weight_averages import EMA, StochasticWeightAveraging

__all__ = [
    "EMA",
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "Profile",
    "StochasticWeightAveraging",
    "SystemMonitor",
]


def __getattr__(name: str) -> Any:
    if name not in BUILT_IN:
        if advice := instead("function", name):
            raise ImportError(f"there is no {name}{advice}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(BUILT_IN[name].rpartition(".")[0]), name)
