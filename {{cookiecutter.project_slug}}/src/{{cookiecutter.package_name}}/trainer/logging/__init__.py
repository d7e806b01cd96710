"""Logging: metrics, loggers and the progress bar.

``Recorder`` keeps what a module logs on its device until it is shown; ``make_loggers`` makes the
loggers that write it, and a new one is added in ``loggers.py``. Imports ``launch`` and the folders
below it.
"""

from .context import BatchContext
from .loggers import Logger, make_loggers
from .metrics import Recorder, ReduceFx
from .outputs import Outputs
from .progress import Progress

__all__ = [
    "BatchContext",
    "Logger",
    "Outputs",
    "Progress",
    "Recorder",
    "ReduceFx",
    "make_loggers",
]
