"""Ranks that something outside has started: torchrun, srun, mpirun, or a launcher of ours."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from .failures import leftover_threads
from .failures.reports import PARENT, end_failed, is_reported, note_start, report_failure, working
from .interruption import Interrupted
from .preemption import Preempted

Result = TypeVar("Result")

# All ranks have agreed to end so, and come to the teardown together.
_AGREED = (Interrupted, Preempted)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_external(
    run: Callable[[], Result],
    teardown: Callable[[], object] = bool,
    waits_for_peers: Callable[[], bool] = bool,
) -> Result:
    """Run as one rank of several that something outside has started, or as the only one.

    Args:
        run: the rank's work. Its failure is written where the launcher looks for it, so that the
            first rank's is shown.
        teardown: called after that: only then may the others notice that this rank has gone.
        waits_for_peers: whether ``teardown`` would wait for the others for ever after a failure.
            Then it is not called, and the failure ends this process.

    Raises:
        RankError: it has lost another rank; in place of the error that says only that.
    """
    _die_with_parent()
    note_start()
    with working():
        try:
            result = run()
        except BaseException as error:
            if not waits_for_peers() or isinstance(error, _AGREED):
                loss = report_failure(error)
                _tear_down(teardown, error)
            elif isinstance(error, KeyboardInterrupt):
                raise  # it ends all ranks
            else:
                end_failed(error)
            if loss is None:
                raise
            raise loss from None
        teardown()
        _end_with_main_thread()
        return result


def _tear_down(teardown: Callable[[], object], error: BaseException) -> None:
    """Undo what a rank has connected; that this fails too must not take the error's place."""
    try:
        teardown()
    except Exception as another:
        error.add_note(f"then the teardown failed: {type(another).__name__}: {another}")
    _end_with_main_thread()


def _end_with_main_thread() -> None:
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
