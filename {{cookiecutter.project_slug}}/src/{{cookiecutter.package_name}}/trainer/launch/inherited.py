"""What a process has inherited from a rank that started it, and is not its own.

A rank may start commands (a callback that evaluates, a script that trains another model). They
inherit the variables that our launcher has set for the rank alone: its place among the ranks, and
where its failure is written. To such a command these would say that it is the rank itself.
"""

import os
import sys
from pathlib import Path

from .failures.reports import PARENT, RANK_PROCESS
from .failures.watcher import Place
from .outcome import FILE as OUTCOME

_OURS = "TRAINER_"
# Launchers that set RANK themselves, and by what they are recognized.
_OTHERS = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}


def disown() -> None:
    """Drop the variables of a rank from a process that is none; a rank claims them as its own."""
    if PARENT not in os.environ:
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
