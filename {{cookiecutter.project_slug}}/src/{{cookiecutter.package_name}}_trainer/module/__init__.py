"""The user's classes: a module with its steps, and a data module.

It imports from ``logging/``, ``launch/`` and the floors below.
"""

from .current_run import OptionNames, Run, RunFacts, RunProperties, TrainerState, Weights
from .hooks import (
    DataHooks,
    DataModule,
    Hooks,
    Loader,
    Loaders,
    is_overridden,
    problems_of_lazy,
    problems_of_max_norm,
    problems_of_names,
    problems_of_signatures,
)
from .training_module import TrainingModule

__all__ = [
    "DataHooks",
    "DataModule",
    "Hooks",
    "Loader",
    "Loaders",
    "OptionNames",
    "Run",
    "RunFacts",
    "RunProperties",
    "TrainerState",
    "TrainingModule",
    "Weights",
    "is_overridden",
    "problems_of_lazy",
    "problems_of_max_norm",
    "problems_of_names",
    "problems_of_signatures",
]
