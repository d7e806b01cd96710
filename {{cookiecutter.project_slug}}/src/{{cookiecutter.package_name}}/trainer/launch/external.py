"""Ranks that something outside has started: torchrun, srun, mpirun, or a launcher of ours."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from .. import leftover_threads
from .failures import PARENT, is_reported, note_start, report_failure, working

Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_external(run: Callable[[], Result], teardown: Callable[[], object] = bool) -> Result:
    """Run as one rank of several that something outside has started, or as the only one.

    Args:
        run: the rank's work. Its failure is written where the launcher looks for it, so that the
            first rank's is shown.
        teardown: called after that: only then may the others notice that this rank has gone.

    Raises:
        RankError: it has lost another rank; in place of the error that says only that.
    """
    _die_with_parent()
    note_start()
    with working():
        try:
            return run()
        except BaseException as error:
            loss = report_failure(error)
            if loss is None:
                raise
            raise loss from None
        finally:
            teardown()
            if is_reported():
                leftover_threads.end_with_main_thread()


def _die_with_parent() -> None:
    """Have the kernel end this rank when the process that started it is gone, even by SIGKILL."""
    parent = os.environ.get(PARENT)
    if parent is None or not parent.isdecimal() or os.getppid() not in (int(parent), 1):
        return  # not a rank that we started; perhaps a child of one, with its variables
    if sys.platform == "linux":
        # Not a thread that watches: it could not run while native code holds the interpreter.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank is gone")
