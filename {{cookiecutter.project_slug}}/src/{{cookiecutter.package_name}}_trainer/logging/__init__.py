"""Logging: metrics, loggers and the progress bar.

``Recorder`` keeps what a module logs on its device until it is shown. ``create_loggers`` creates
the loggers that write it; a new one is registered in ``logger.py``. Imports ``launch`` and the
folders below it.
"""

from .logger import LoggedRun, Logger
from .logger import create as create_loggers
from .loggers import CSVLogger, TensorBoardLogger
from .metrics import BatchContext, Recorder, ReduceFx
from .outputs import Outputs
from .progress import Progress
from .speed import Speed, peak_memory

__all__ = [
    "BatchContext",
    "CSVLogger",
    "LoggedRun",
    "Logger",
    "Outputs",
    "Progress",
    "Recorder",
    "ReduceFx",
    "Speed",
    "TensorBoardLogger",
    "create_loggers",
    "peak_memory",
]
