"""How the processes of a run come to be: they are there already, or this one starts them."""

from .external import run_external
from .failures.reports import RankError, describe, end_hung, end_process, is_reported
from .functions import run_in_processes
from .inherited import disown
from .subprocesses import is_interactive, supervise_copies

__all__ = [
    "RankError",
    "describe",
    "disown",
    "end_hung",
    "end_process",
    "is_interactive",
    "is_reported",
    "run_external",
    "run_in_processes",
    "supervise_copies",
]
