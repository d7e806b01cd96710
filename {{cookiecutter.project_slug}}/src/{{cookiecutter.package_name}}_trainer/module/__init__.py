"""The user's classes: a module with its steps, and a data module.

Checks of their hooks are in ``hooks.py``. Imports ``logging``, ``launch`` and the floors below.
"""

from .current_run import Run, Weights
from .hooks import DataHooks, DataModule, Loader, Loaders
from .training_module import TrainingModule

__all__ = ["DataHooks", "DataModule", "Loader", "Loaders", "Run", "TrainingModule", "Weights"]
