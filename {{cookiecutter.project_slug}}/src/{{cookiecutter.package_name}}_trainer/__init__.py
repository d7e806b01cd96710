"""The bundled trainer: trains your module with any strategy."""

from .callbacks import Callback
from .data import seed_everything, sequence
from .errors import CheckpointError, ConfigurationError, UserError
from .launch import RankError
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
    "sequence",
]
