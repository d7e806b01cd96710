"""Ranks that were started externally: by torchrun, srun, mpirun, or by one of our launchers."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from .failures import leftover_threads
from .failures.reports import PARENT, end_failed, is_reported, report_failure, report_start, working
from .interruption import Interrupted
from .preemption import Preempted

Result = TypeVar("Result")

# All ranks have agreed to stop, and reach the teardown together.
_AGREED = (Interrupted, Preempted)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_external(
    run: Callable[[], Result],
    teardown: Callable[[], object] = bool,
    waits_for_peers: Callable[[], bool] = bool,
    lost_peer: Sequence[str] = (),
) -> Result:
    """Run as one rank of an external launch, or as the only rank.

    Args:
        run: The work of this rank. Its failure is written where the launcher looks for it, so that
            the failure of the first rank is shown.
        teardown: Called after ``run``: until then, peers must not notice that this rank has ended.
        waits_for_peers: Whether ``teardown`` would wait for peers forever after a failure. It is
            then skipped, and the failure ends this process.
        lost_peer: Names of an engine's exceptions that only report the loss of a peer.

    Raises:
        RankError: A peer was lost; replaces the error that only reports the lost connection.
    """
    _die_with_parent()
    report_start()
    with working():
        try:
            result = run()
        except BaseException as error:
            if not waits_for_peers() or isinstance(error, _AGREED):
                loss = report_failure(error, lost_peer=lost_peer)
                _tear_down(teardown, error)
            elif isinstance(error, KeyboardInterrupt):
                raise  # SIGINT ends all ranks
            else:
                end_failed(error, lost_peer)
            if loss is None:
                raise
            raise loss from None
        teardown()
        _end_with_main_thread()
        return result


def _tear_down(teardown: Callable[[], object], error: BaseException) -> None:
    """Call ``teardown``; an error in it must not replace the original error."""
    try:
        teardown()
    except Exception as another:
        error.add_note(f"then the teardown failed: {type(another).__name__}: {another}")
    _end_with_main_thread()


def _end_with_main_thread() -> None:
    if is_reported():
        leftover_threads.end_with_main_thread()


def _die_with_parent() -> None:
    """Let the kernel kill this rank when its parent process ends, even by SIGKILL."""
    parent = os.environ.get(PARENT)
    if parent is None or not parent.isdecimal() or os.getppid() not in (int(parent), 1):
        return  # not a rank of our launcher; perhaps a child process that inherited its variables
    if sys.platform == "linux":
        # Not a thread that polls: it could not run while native code holds the GIL.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank has ended")
