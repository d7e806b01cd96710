"""Logging: metrics, loggers and the progress bar.

``Recorder`` keeps what a module logs on its device until it is shown. A new logger is registered in
``logger.py``. Imports ``launch`` and the folders below it.
"""

from .logger import LoggedRun, Logger
from .metrics import BatchContext, Recorder

__all__ = ["BatchContext", "LoggedRun", "Logger", "Recorder"]
