"""The bundled trainer: trains your module with any strategy."""

import importlib
import importlib.util
from functools import partial

from .callbacks import Callback
from .data.randomness import seed_everything
from .errors import CheckpointError, ConfigurationError, UserError, foreign, instead
from .launch.failures import RankError
from .logging import LoggedRun, Logger
from .module import DataModule, TrainingModule
from .strategies import SingleDevice, Strategy, register
from .trainer import Trainer

__all__ = [
    "Callback",
    "CheckpointError",
    "ConfigurationError",
    "DataModule",
    "LoggedRun",
    "Logger",
    "RankError",
    "SingleDevice",
    "Strategy",
    "Trainer",
    "TrainingModule",
    "UserError",
    "register",
    "seed_everything",
]

if importlib.util.find_spec(f"{__name__}.legacy"):  # a folder that may be deleted
    foreign.load = partial(importlib.import_module, f"{__name__}.legacy")


def __getattr__(name: str) -> object:
    if advice := instead("function", name):
        raise ImportError(f"there is no {name}{advice}")
    raise AttributeError(name)
