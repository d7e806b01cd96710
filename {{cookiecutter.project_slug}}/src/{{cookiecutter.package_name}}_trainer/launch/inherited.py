"""Environment variables that a command inherits from the rank that started it.

A rank may start commands (a callback that evaluates, a script that trains another model). They
inherit the variables that our launcher has set for this rank only: its rank, and where to write
its failure report. A command that reads them would take itself for the rank.
"""

import os
import sys
from pathlib import Path

from .failures.reports import PARENT, RANK_PROCESS
from .failures.watchdog import DIRECTORY
from .failures.watcher import Place
from .outcome import FILE as OUTCOME

_OURS = "TRAINER_"
# Variables of launchers that set RANK themselves.
_OTHERS = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}


def drop_inherited_variables() -> None:
    """Remove a rank's launch variables in a process that is not the rank; a rank keeps its own."""
    if PARENT not in os.environ or "RANK" not in os.environ:
        os.environ.pop(DIRECTORY, None)  # of no launcher
        return
    process, own = os.environ.get(RANK_PROCESS), str(os.getpid())
    if not process or process == own:
        os.environ[RANK_PROCESS] = own
        return
    rank = os.environ.get("RANK", "?")
    is_started_otherwise = bool(_OTHERS & os.environ.keys())
    for name in Place(1, Path()).variables(0):
        if name.startswith(_OURS) or not is_started_otherwise:
            os.environ.pop(name, None)
    os.environ.pop(OUTCOME, None)
    sys.stderr.write(
        f"note: rank {rank} of another run has started this process; that run's launch variables "
        "are ignored\n"
    )
