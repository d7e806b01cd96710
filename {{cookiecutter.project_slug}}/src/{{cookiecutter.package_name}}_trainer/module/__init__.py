"""The user's classes: a module with its steps, and a data module.

It imports from ``logging/`` and ``errors.py``.
"""

from .data_module import DataModule, Loader, Loaders
from .hooks import Hooks, StageHooks
from .overrides import is_overridden, problems_of_names, problems_of_signatures
from .run import Manual, Run, Shard, TrainerState, Weights
from .training_module import TrainingModule

__all__ = [
    "DataModule",
    "Hooks",
    "Loader",
    "Loaders",
    "Manual",
    "Run",
    "Shard",
    "StageHooks",
    "TrainerState",
    "TrainingModule",
    "Weights",
    "is_overridden",
    "problems_of_names",
    "problems_of_signatures",
]
