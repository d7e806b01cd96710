"""Run this process as a rank: one that torchrun or our launcher has started, or the only one."""

import contextlib
import ctypes
import functools
import gc
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..errors import UserError
from . import collectives, failures, files, output, reports
from .cluster import Layout
from .signals import Interrupted, Preempted

Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_OTHERS = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}  # variables of launchers that set RANK themselves
_ATTEMPTS = "restarts.json"
_MOST_FAILURES = 3
_SECONDS_TO_BE_ENDED = 10.0
_TASKS = Path("/proc/self/task")
_OF_TORCH = "(pt_"  # how threads that torch has started itself are named
_MOST_SECONDS, _POLL_SECONDS = 1.0, 0.0005


def run_external(
    run: Callable[[], Result],
    teardown: Callable[[], object] = bool,
    lost_peer: Sequence[str] = (),
    teardown_may_hang: Callable[[], bool] = bool,
) -> Result:
    """Run as one rank of an external launch, or as the only one; report a failure to the launcher.

    ``teardown``: called after ``run``: until then, peers must not notice that this rank has ended;
    after a failure not if it would wait for peers forever, as ``teardown_may_hang`` says.
    ``lost_peer``: names of an engine's exceptions that only report a lost peer.
    """
    _die_with_parent()
    keep_children_from_hanging()
    reports.report_start()
    reports.set_state("working")
    try:
        result = run()
    except BaseException as error:
        # After a save, all ranks have agreed to stop, and reach the teardown together.
        has_saved = isinstance(error, Interrupted | Preempted)
        is_lost = collectives.world_size() > 1 and failures.is_lost_peer(error, lost_peer)
        # Nor wait for the threads and the store of a process group that has lost a peer.
        if (is_lost or collectives.teardown_may_hang() or teardown_may_hang()) and not has_saved:
            if isinstance(error, KeyboardInterrupt):
                raise  # SIGINT ends all ranks
            failures.exit_after_failure(error, lost_peer)
        failures.report_failure(error, lost_peer)
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
    parent = os.environ.get(reports.PARENT, str(os.getppid()) if leaves_orphans else "")
    if not parent or str(os.getppid()) not in (parent, "1"):
        return  # not a rank; perhaps a child process that inherited its variables
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != parent:
        sys.exit("the process that started this rank has ended")


def drop_inherited_variables() -> None:
    """Remove a rank's launch variables in a command that the rank has started.

    A command that reads them would take itself for the rank. A rank keeps its own.
    """
    if reports.PARENT not in os.environ or "RANK" not in os.environ:
        os.environ.pop(reports.DIRECTORY, None)  # of no launcher
        return
    process, pid = os.environ.get(reports.RANK_PROCESS), str(os.getpid())
    if not process or process == pid:
        os.environ[reports.RANK_PROCESS] = pid
        return
    rank, is_started_otherwise = os.environ["RANK"], bool(_OTHERS & os.environ.keys())
    from .watch import NodeLaunch

    for name in (*NodeLaunch(1, Path()).variables(0), reports.OUTCOME):
        if name.startswith("TRAINER_") or not is_started_otherwise:
            os.environ.pop(name, None)
    line = f"note: rank {rank} of another run has started this process"
    output.print_lines(f"{line}; that run's launch variables are ignored", error=True)


def is_interactive() -> bool:
    """Whether this process is a notebook or an interactive session."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


# --- restarts by torchelastic: resume the run, and stop when it makes no progress ----------------


def restarts_expected(layout: Layout, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun restarts the ranks when one fails (``--max-restarts``)."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return layout.source == "torchelastic" and restarts != "0"


def elastic_run_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Default name of the run: torchrun's ``--rdzv-id``; ``None`` if it is not set."""
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun-{name}"


def launched_at() -> float:
    """When torchrun was started, in whole seconds; where it is not known, 0 in a restart."""
    try:
        ticks = Path(f"/proc/{os.getppid()}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
        boot = re.search(r"^btime (\d+)", Path("/proc/stat").read_text("utf-8"), re.MULTILINE)
        return int(boot[1] if boot else 0) + int(ticks) // os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0 if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else math.inf


def count_attempt(directory: Path, step: int, layout: Layout) -> None:
    """Count an attempt from a step, on the main rank; after three that failed, stop torchrun."""
    failures, path = 0, directory / _ATTEMPTS
    if layout.is_main:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # none, or damaged
            record = files.read_json(path, 2**16)
            failures = record["failures"] + 1 if record["step"] == step else 0
        files.write_atomically(path, json.dumps({"step": step, "failures": failures}))
    if collectives.broadcast(failures) < _MOST_FAILURES:
        return
    problem = f"{_MOST_FAILURES} failures without progress after step {step}: see their errors"
    reports.write_failed(problem)
    if layout.is_main:
        reset_attempts(directory)
        output.print_lines(f"error: {problem}", error=True)
    collectives.barrier()
    if layout.local_rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)  # nothing else tells torchrun not to restart it
    time.sleep(_SECONDS_TO_BE_ENDED)
    raise UserError(problem)


def reset_attempts(directory: Path) -> None:
    """Reset the count: the run finished, or was asked to stop."""
    (directory / _ATTEMPTS).unlink(missing_ok=True)


@functools.cache  # once in a process
def keep_children_from_hanging() -> None:
    """Have each fork of this process from now on take care of two ways in which its child hangs.

    - To destroy an earlier run's process group, if it is in a reference cycle, a child waits for a
      thread of gloo, which exists only in the parent: children do not collect what they inherit.
    - Up to Python 3.11.9, a child waits for a lock of the interpreter that a thread has at the
      fork, for example one of gloo that frees a tensor (https://github.com/python/cpython/issues/
      112275): the fork waits until torch's threads are idle.
    """
    os.register_at_fork(after_in_child=gc.freeze)
    if sys.version_info < (3, 11, 10):
        os.register_at_fork(before=_wait_for_threads)


def _wait_for_threads() -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    while _is_any_running() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _is_any_running() -> bool:
    """Whether a thread of torch runs, other than this one; False where there is no ``/proc``."""
    thread_id = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                name, _, rest = (task / "stat").read_text("utf-8").rpartition(")")
                if _OF_TORCH in name and task.name != thread_id and rest.split()[0] != "S":
                    return True
    return False
