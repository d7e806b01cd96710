"""Start ranks: the same command once per rank, or a function in new processes; and be a rank.

A rank that another program (torchrun, srun, mpirun) or one of these launchers has started runs its
work in :func:`run_external`.
"""

import atexit
import ctypes
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import UserError
from . import collectives, forks, outcome, reports, signals
from .cluster import Layout
from .pickling import find_unpicklable
from .reports import PARENT, RANK_PROCESS, Failure, RankError
from .signals import Interrupted, Preempted
from .watch import Place, Watcher

Result = TypeVar("Result")
Method = Literal["spawn", "fork"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Variables of launchers that set RANK themselves.
_OTHERS = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}
# Exit code of a spawned process that tries to start the run again; used for nothing else.
_NO_MAIN_GUARD = 113

_Work = Path | Callable[[], object]
"""The function to run, or the path of the file that contains it pickled."""

# --- a rank --------------------------------------------------------------------------------------


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
    for name in (*Place(1, Path()).variables(0), outcome.FILE):
        if name.startswith("TRAINER_") or not is_started_otherwise:
            os.environ.pop(name, None)
    reports.write_error(
        f"note: rank {rank} of another run has started this process; that run's launch variables "
        "are ignored"
    )


# --- the same command, once per rank -------------------------------------------------------------


def is_interactive() -> bool:
    """Whether this process is a notebook or an interactive session."""
    return hasattr(sys, "ps1")


def threads_each(processes: int) -> int:
    """Threads per process, as in torchrun: processes that each use every core slow down."""
    return max(1, (os.cpu_count() or 1) // processes)


def supervise_copies(processes: int, layout: Layout, directory: Path) -> NoReturn:
    """Start the current command once per rank on this node, watch the ranks, and exit like them.

    Args:
        processes: Number of ranks to start on this node.
        layout: Layout of the nodes, where this command was started once per node.
        directory: Working directory of the ranks, so that relative paths keep their meaning.

    Raises:
        UserError: There is not a command to run again.
    """
    # sys.argv[0] is "" or "-" when Python reads the program from standard input.
    if is_interactive() or sys.argv[0] in ("", "-"):
        raise UserError(
            "an interactive session, or a script on standard input, has no command to start once "
            "per rank; use strategy='ddp_notebook', write a script, or use torchrun"
        )
    # Readable by this user only: on one node it contains the store of the ranks.
    with tempfile.TemporaryDirectory(prefix="trainer-launch-") as private:
        place = Place(processes, Path(private), layout)
        failure = Watcher(partial(_start_copies, place, directory), "fork", place).watch()
    if failure is None:
        sys.exit(0)
    if failure.rank >= 0 or failure.code == signals.INTERRUPTED_CODE:
        outcome.write_failure(failure.message)
        reports.write_error(failure.message)
    sys.exit(failure.code)


def _start_copies(place: Place, directory: Path) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, *sys.orig_argv[1:]]
    for local_rank in range(place.processes):
        variables = {**os.environ, **place.variables(local_rank)}
        variables.setdefault("OMP_NUM_THREADS", str(threads_each(place.processes)))
        # A separate process group, so that a rank's loader workers are terminated with it.
        yield subprocess.Popen(command, env=variables, cwd=directory, process_group=0)


# --- a function, in new processes ----------------------------------------------------------------


def run_in_processes(
    method: Method, processes: int, work: Callable[[], Result], names: dict[str, Any]
) -> Result:
    """Run a function once per rank, each in its own process; return the value of rank 0.

    Args:
        method: ``"spawn"`` pickles the function; ``"fork"`` copies this process.
        processes: Number of ranks to start on this node.
        work: The function; it runs in :func:`run_external`.
        names: Objects that ``work`` refers to, by the user's names; used in pickling errors.

    Raises:
        UserError: The processes cannot be started this way, or a rank raised a ``UserError``.
        RankError: A rank failed.
        KeyboardInterrupt: This process received SIGINT and the ranks have ended: an
            :class:`~..signals.Interrupted` if they have saved a checkpoint.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(_NO_MAIN_GUARD)  # the parent process prints the message, once for all ranks
    if method == "fork":
        _check_can_fork(names)
    # Readable by this user only: it contains the store of the ranks, and what is pickled.
    with tempfile.TemporaryDirectory(prefix="trainer-launch-") as private:
        place, result = Place(processes, Path(private)), Path(private) / "result"
        given = work if method == "fork" else _pickle_work(work, names, Path(private) / "work")
        start = partial(_start_processes, method, given, place, result)
        failure = Watcher(start, method, place).watch()
        if failure is not None:
            raise _exception(failure)
        if not result.exists():
            raise RankError("rank 0 ended without a result")
        # Safe: rank 0 has pickled it, as this process has pickled the work.
        return cast(Result, pickle.loads(result.read_bytes()))  # noqa: S301


def _check_can_fork(names: dict[str, Any]) -> None:
    if torch.cuda.is_initialized():
        raise UserError(
            "processes cannot be forked: CUDA is initialized in this one already (a .cuda(), "
            ".to('cuda') or torch.cuda call before fit); restart it and leave devices to the "
            "trainer, or use strategy='ddp_spawn'"
        )
    for name, value in names.items():
        for path, tensor in value.state_dict().items() if isinstance(value, nn.Module) else ():
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.is_shared():
                raise UserError(
                    f"{name}.{path} is in shared memory, to which all forked processes would "
                    "write; train a copy.deepcopy of the model, or use strategy='ddp_spawn'"
                )


def _pickle_work(work: Callable[[], object], names: dict[str, Any], path: Path) -> Path:
    # Pickle by value: torch's own pickler would make all ranks share one set of weights, and would
    # require a rank to outlive the tensors that it sends. And into a file: through the pipe of
    # multiprocessing, each process would start only after the previous one has read its part.
    pickled = _pickled(work, names)
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    has_script = getattr(main, "__spec__", None) is not None or (file and Path(file).is_file())
    # A script is imported by its path, even "<stdin>", although nothing in it is needed.
    if not has_script and (file or b"__main__" in pickled):
        raise UserError(
            "processes that are spawned import the script, and this session (a notebook, "
            "python -c, standard input) has none; write it into a file, or use "
            "strategy='ddp_notebook'"
        )
    path.write_bytes(pickled)
    return path


def _pickled(value: object, names: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        found = (find_unpicklable(each, name) for name, each in names.items())
        line = next((each for each in found if each is not None), None)
        raise UserError(line or f"cannot be pickled for other processes: {error}") from error


def _start_processes(method: Method, given: _Work, place: Place, result: Path) -> Iterator[Any]:
    context: Any = multiprocessing.get_context(method)
    for rank in range(place.processes):
        arguments = (given, place.variables(rank), result if rank == 0 else None)
        process = context.Process(target=_run_rank, args=arguments)
        process.start()
        yield SimpleNamespace(pid=process.pid, poll=partial(getattr, process, "exitcode"))


def _run_rank(given: _Work, variables: dict[str, str], result: Path | None) -> None:
    """Entry point of a new process: set its environment, run the function, write the result."""
    os.setpgid(0, 0)
    if os.getppid() != int(variables[PARENT]):
        sys.exit("the process that started this rank has ended")
    os.environ.update(variables)
    if isinstance(given, Path):
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_each(int(variables["LOCAL_WORLD_SIZE"])))
    else:
        # OpenMP threads do not survive a fork: a region with more than one thread would hang.
        torch.set_num_threads(1)
        # Drop the parent's atexit handlers: multiprocessing does this itself from Python 3.13 on.
        atexit._clear()
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    try:
        # Safe: the parent process pickled this file itself.
        returned = run_external(
            lambda: pickle.loads(given.read_bytes()) if isinstance(given, Path) else given  # noqa: S301
        )()
        if result is not None:
            run_external(lambda: result.write_bytes(_pickled(returned, {"outcome": returned})))
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(signals.INTERRUPTED_CODE)
    except BaseException:
        # The failure report is written; multiprocessing would print the error a second time.
        sys.exit(1)


def _exception(failure: Failure) -> BaseException:
    if failure.interrupted is not None:
        return failure.interrupted
    if failure.code == _NO_MAIN_GUARD:
        return UserError(
            "the script starts processes while it is being imported by one of them; put the call "
            "under: if __name__ == '__main__': (see docs/trouble.md#the-main-guard-is-missing)"
        )
    if failure.rank < 0:
        # Behave as if there were no watcher: run Python's default handler, or the user's.
        signal.raise_signal(failure.code - 128)
    return UserError(failure.problems) if failure.problems else RankError(failure.message)
