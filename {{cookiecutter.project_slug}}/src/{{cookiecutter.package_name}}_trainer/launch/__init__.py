"""How the ranks of a run are started: by an external launcher, or by this process.

``cluster/`` reads from the environment which rank this process is, ``devices/`` which devices it
has, and ``failures/`` reports what ended it. Imports ``arguments`` and ``errors``.
"""

from .external import run_external
from .failures.reports import (
    RankError,
    allow_loss,
    describe,
    end_hung,
    end_process,
    is_reported,
)
from .functions import run_in_processes
from .inherited import drop_inherited_variables
from .subprocesses import is_interactive, supervise_copies

__all__ = [
    "RankError",
    "allow_loss",
    "describe",
    "drop_inherited_variables",
    "end_hung",
    "end_process",
    "is_interactive",
    "is_reported",
    "run_external",
    "run_in_processes",
    "supervise_copies",
]
