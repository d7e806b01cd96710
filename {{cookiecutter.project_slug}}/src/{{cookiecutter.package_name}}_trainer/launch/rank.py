"""Be a rank: one that a program such as torchrun or our launcher has started, or the only one."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from . import collectives, forks, outcome, reports
from .reports import PARENT, RANK_PROCESS
from .signals import Interrupted, Preempted

Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Variables of launchers that set RANK themselves.
_OTHERS = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}


def run_external(
    run: Callable[[], Result],
    teardown: Callable[[], object] = bool,
    lost_peer: Sequence[str] = (),
    end_waits: Callable[[], bool] = bool,
) -> Result:
    """Run as one rank of an external launch, or as the only rank.

    Args:
        run: The work of this rank. Its failure is written where the launcher looks for it.
        teardown: Called after ``run``: until then, peers must not notice that this rank has ended.
            After a failure, it is skipped if it would wait for peers forever; the process ends.
        lost_peer: Names of an engine's exceptions that only report the loss of a peer.
        end_waits: Whether the end of this process would wait for its peers, after a failure.
    """
    _die_with_parent()
    forks.keep_children_from_hanging()
    reports.report_start()
    reports.set_state("working")
    try:
        result = run()
    except BaseException as error:
        # After a save, all ranks have agreed to stop, and reach the teardown together.
        has_saved = isinstance(error, Interrupted | Preempted)
        is_lost = collectives.world_size() > 1 and reports.is_lost_peer(error, lost_peer)
        # Nor wait for the threads and the store of a process group that has lost a peer.
        if (is_lost or collectives.end_waits() or end_waits()) and not has_saved:
            if isinstance(error, KeyboardInterrupt):
                raise  # SIGINT ends all ranks
            reports.end_failed(error, lost_peer)
        reports.report_failure(error, lost_peer)
        try:
            teardown()
        except Exception as another:  # must not replace the original error
            error.add_note(f"then the teardown failed: {type(another).__name__}: {another}")
        raise
    else:
        teardown()
        return result
    finally:
        reports.set_state("started")


def _die_with_parent() -> None:
    """Let the kernel kill this rank when its parent process ends, even while code holds the GIL."""
    # When torchrun or Open MPI are killed, nobody else ends their ranks.
    leaves_orphans = {*_OTHERS, "OMPI_COMM_WORLD_RANK"} & os.environ.keys()
    parent = os.environ.get(PARENT, str(os.getppid()) if leaves_orphans else "")
    if not parent.isdecimal() or os.getppid() not in (int(parent), 1):
        return  # not a rank; perhaps a child process that inherited its variables
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank has ended")


def drop_inherited_variables() -> None:
    """Remove a rank's launch variables in a command that the rank has started.

    A command that reads them would take itself for the rank. A rank keeps its own.
    """
    if PARENT not in os.environ or "RANK" not in os.environ:
        os.environ.pop(reports.DIRECTORY, None)  # of no launcher
        return
    process, own = os.environ.get(RANK_PROCESS), str(os.getpid())
    if not process or process == own:
        os.environ[RANK_PROCESS] = own
        return
    rank = os.environ["RANK"]
    is_started_otherwise = bool(_OTHERS & os.environ.keys())
    from .watch import Place

    for name in (*Place(1, Path()).variables(0), outcome.FILE):
        if name.startswith("TRAINER_") or not is_started_otherwise:
            os.environ.pop(name, None)
    reports.write_error(
        f"note: rank {rank} of another run has started this process; that run's launch variables "
        "are ignored"
    )


def is_interactive() -> bool:
    """Whether this process is a notebook or an interactive session."""
    return hasattr(sys, "ps1")
