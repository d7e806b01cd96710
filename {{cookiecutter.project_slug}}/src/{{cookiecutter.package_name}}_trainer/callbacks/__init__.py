"""Callbacks: what is done at moments of a fit, beside the module's own hooks.

One file per callback. Imports ``module``, ``checkpoint`` and the folders below them.
"""

from .base import Callback
from .best_checkpoint import BestCheckpoint
from .calls import HookCalls, calls_of, problems_of_manual
from .creation import create as create_callbacks
from .early_stopping import EarlyStopping
from .ema import EMA
from .profile import Profile
from .stochastic_weight_averaging import StochasticWeightAveraging
from .system_monitor import SystemMonitor
from .upload_checkpoints import UploadCheckpoints

__all__ = [
    "EMA",
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "HookCalls",
    "Profile",
    "StochasticWeightAveraging",
    "SystemMonitor",
    "UploadCheckpoints",
    "calls_of",
    "create_callbacks",
    "problems_of_manual",
]
