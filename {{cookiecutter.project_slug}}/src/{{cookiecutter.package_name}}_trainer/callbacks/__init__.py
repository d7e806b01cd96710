"""Callbacks: what is done at moments of a fit, beside the module's own hooks.

Imports ``module``, ``checkpoint`` and the folders below them.
"""

from .callback import Callback
from .calls import HookCalls, calls_of, problems_of_manual
from .calls import create as create_callbacks
from .monitored import BestCheckpoint, EarlyStopping
from .profile import Profile
from .system_monitor import SystemMonitor
from .weight_averages import EMA, StochasticWeightAveraging

__all__ = [
    "EMA",
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "HookCalls",
    "Profile",
    "StochasticWeightAveraging",
    "SystemMonitor",
    "calls_of",
    "create_callbacks",
    "problems_of_manual",
]
