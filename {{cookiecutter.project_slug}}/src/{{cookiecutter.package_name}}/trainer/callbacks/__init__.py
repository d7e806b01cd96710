"""Callbacks: what is done at moments of a fit, beside the module's own hooks.

One file per callback. Imports ``module``, ``checkpoint`` and the folders below them.
"""

from .base import Callback
from .best_checkpoint import BestCheckpoint
from .calls import HookCalls, calls_of, problems_of_manual, problems_of_signatures
from .creation import create as create_callbacks
from .early_stopping import EarlyStopping

__all__ = [
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "HookCalls",
    "calls_of",
    "create_callbacks",
    "problems_of_manual",
    "problems_of_signatures",
]
