"""Start ranks: the same command once per rank, or a function in new processes."""

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import UserError, user_error
from . import failures, held_folders, output, reports, signals
from .cluster import Layout
from .pickling import find_unpicklable
from .rank import is_interactive, run_external
from .watch import NodeLaunch, Watcher

Result = TypeVar("Result")
Method = Literal["spawn", "fork"]
_NO_MAIN_GUARD = 113  # exit code of a spawned process that starts the run again, and of no other
_DEBUGGER = f"{__name__}.no_debugger"
_Work = Path | Callable[[], object]  # the function to run, or the file that has it pickled


def threads_each(processes: int) -> int:
    """Threads per process, as in torchrun: processes that each use every core slow down."""
    return max(1, (os.cpu_count() or 1) // processes)


def supervise_copies(processes: int, layout: Layout, directory: Path) -> NoReturn:
    """Start the current command once per rank on this node, watch the ranks, and exit like them.

    ``layout``: of the nodes; ``directory``: where ranks run, unless the script's path says where
    this process was started: it may have changed its directory, and ranks do it again.
    """
    # sys.argv[0] is "" or "-" when Python reads the program from standard input.
    if is_interactive() or sys.argv[0] in ("", "-") or sys.argv[0].startswith("/dev/"):
        session = "an interactive session, or a script on standard input,"
        advice = "use strategy='ddp_notebook', write a script, or use torchrun"
        raise UserError(f"{session} has no command to start once per rank; {advice}")
    callers = {
        "a process of multiprocessing": multiprocessing.parent_process() is not None,
        "a thread": threading.current_thread() is not threading.main_thread(),
        "a test": Path(sys.argv[0].removesuffix("/__main__.py")).name in ("pytest", "unittest")
        or (sys.argv[0] == "-c" and "execnet" in sys.modules),  # of pytest-xdist
    }
    if caller := next((name for name, is_caller in callers.items() if is_caller), None):
        problem = f"{caller} cannot start this command once per rank, and exit like the ranks"
        advice = "call it in the main thread of a script, or use strategy='ddp_spawn'"
        raise UserError(f"{problem}; {advice}")
    # Readable by this user only: on one node it contains the store of the ranks.
    with held_folders.private_folder("trainer-launch-") as private:
        node = NodeLaunch(processes, private, layout)
        failure = Watcher(partial(_start_copies, node, directory), "fork", node).watch()
    if failure is None:
        sys.exit(0)
    if failure.rank >= 0 or failure.code == signals.INTERRUPTED_CODE:
        reports.write_failed(failure.message)
        output.print_lines(failure.message, error=True)
    sys.exit(failure.code)


def _start_copies(node: NodeLaunch, directory: Path) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, *sys.orig_argv[1:]]
    script, file = sys.argv[0], str(getattr(sys.modules["__main__"], "__file__", ""))
    if not Path(script).is_absolute() and file.endswith(f"/{script}"):
        directory = Path(file.removesuffix(script))
    threads = str(threads_each(node.processes))
    for local_rank in range(node.processes):
        variables = {"PYTHONBREAKPOINT": _DEBUGGER, **os.environ, **node.variables(local_rank)}
        variables["OMP_NUM_THREADS"] = variables.get("OMP_NUM_THREADS") or threads
        # A separate process group, so that a rank's loader workers are terminated with it. The
        # kernel would stop it when it reads the terminal.
        stdin = subprocess.DEVNULL if os.isatty(0) else None
        yield subprocess.Popen(command, env=variables, cwd=directory, stdin=stdin, process_group=0)


def no_debugger(*_: object, **__: object) -> NoReturn:
    """What ``breakpoint()`` calls in a rank; raises UserError."""
    advice = "set devices to 1, or PYTHONBREAKPOINT to a debugger that needs no terminal"
    raise UserError(f"breakpoint(): one of several processes has no terminal; {advice}")


def run_in_processes(
    method: Method, processes: int, work: Callable[[], Result], names: dict[str, Any]
) -> Result:
    """Run a function once per rank, each in its own process; return the value of rank 0.

    ``names``: the objects that ``work`` refers to, by the user's names, for errors. Raises the
    ``UserError`` of a rank; another error whose class is the user's or a library's, such as
    ``optuna.TrialPruned``, with a RankError as its cause; or else that.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(_NO_MAIN_GUARD)  # the parent process prints the message, once for all ranks
    if multiprocessing.current_process().daemon:
        problem = "a daemonic process, such as a worker of multiprocessing.Pool, cannot start ranks"
        raise UserError(f"{problem}; use concurrent.futures.ProcessPoolExecutor in its place")
    if method == "fork":
        _check_can_fork(names)
        # A rank would wait forever for the thread of a timer, such as pytest's.
        faulthandler.cancel_dump_traceback_later()
    # Readable by this user only: it contains the store of the ranks, and what is pickled.
    with held_folders.private_folder("trainer-launch-") as private:
        node, result = NodeLaunch(processes, private), private / "result"
        target = work if method == "fork" else _pickle_work(work, names, private / "work")
        watch = Watcher(partial(_start_processes, method, target, node, result), method, node).watch
        if threading.current_thread() is threading.main_thread():
            failure = watch()
        else:
            # At its end, a fork joins threads of concurrent.futures, of which none can join itself.
            with ThreadPool(1) as pool:
                failure = pool.apply(watch)
        if failure is not None:
            _raise(failure, private)
        if not result.exists():
            raise failures.RankError("rank 0 ended without a result")
        # Safe: rank 0 has pickled it, as this process has pickled the work.
        return cast(Result, pickle.loads(result.read_bytes()))  # noqa: S301


def _check_can_fork(names: dict[str, Any]) -> None:
    if torch.cuda.is_initialized():
        raise UserError(
            "processes cannot be forked: CUDA is initialized in this one already (a .cuda(), "
            ".to('cuda') or torch.cuda call before fit); restart it and leave devices to the "
            "trainer, or use strategy='ddp_spawn'"
        )
    if torch.version.cuda is not None and _is_fork_poisoned():
        raise UserError(
            "processes cannot be forked: torch has counted GPUs through CUDA, because NVML is "
            "missing, PYTORCH_NVML_BASED_CUDA_CHECK is 0, or CUDA_VISIBLE_DEVICES has MIG ids; use "
            "strategy='ddp_spawn'"
        )
    for name, value in names.items():
        for path, tensor in value.state_dict().items() if isinstance(value, nn.Module) else ():
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.is_shared():
                problem = "is in shared memory, to which all forked processes would write"
                advice = "train a copy.deepcopy of the model, or use strategy='ddp_spawn'"
                raise UserError(f"{name}.{path} {problem}; {advice}")


def _is_fork_poisoned() -> bool:
    """Whether torch would not use CUDA in a forked process; only such a process is told so."""
    if (pid := os.fork()) == 0:
        os._exit(bool(torch.cuda._is_in_bad_fork()))
    return bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


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
        lines = (find_unpicklable(value, name) for name, value in names.items())
        line = next((line for line in lines if line is not None), None)
        raise UserError(line or f"cannot be pickled for other processes: {error}") from error


def _start_processes(method: Method, work: _Work, node: NodeLaunch, result: Path) -> Iterator[Any]:
    context: Any = multiprocessing.get_context(method)
    for rank in range(node.processes):
        arguments = (work, node.variables(rank), result if rank == 0 else None)
        process = context.Process(target=_run_rank, args=arguments)
        process.start()
        yield SimpleNamespace(pid=process.pid, poll=partial(getattr, process, "exitcode"))


def _run_rank(work: _Work, variables: dict[str, str], result: Path | None) -> None:
    """Entry point of a new process: set its environment, run the function, write the result."""
    os.setpgid(0, 0)
    if str(os.getppid()) != variables[reports.PARENT]:
        sys.exit("the process that started this rank has ended")
    os.environ.update(variables)
    os.environ.setdefault("PYTHONBREAKPOINT", _DEBUGGER)
    if isinstance(work, Path):
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(threads_each(int(variables["LOCAL_WORLD_SIZE"])))
    else:
        torch.set_num_threads(1)  # OpenMP threads do not survive a fork: several would then hang
        atexit._clear()  # of the parent: multiprocessing does this itself from Python 3.13 on
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    try:
        # Safe: the parent process pickled this file itself.
        failures.keep_error = partial(_keep_error, Path(variables[reports.DIRECTORY]))
        returned = run_external(
            lambda: pickle.loads(work.read_bytes()) if isinstance(work, Path) else work  # noqa: S301
        )()
        if result is not None:
            run_external(lambda: result.write_bytes(_pickled(returned, {"outcome": returned})))
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(signals.INTERRUPTED_CODE)
    except BaseException:
        sys.exit(1)  # it is reported; multiprocessing would print the error a second time


def _keep_error(directory: Path, error: BaseException, rank: int) -> None:
    """Keep an error that callers may catch by its class: of a library, or the user's own."""
    known = {"builtins", "torch", __name__.partition(".")[0]}
    if type(error).__module__.partition(".")[0] not in known:
        with contextlib.suppress(Exception):  # it cannot be pickled: RankError says what it was
            (directory / f"error-{rank}").write_bytes(pickle.dumps(error))


def _raise(failure: failures.Failure, directory: Path) -> NoReturn:
    if failure.interrupted is not None:
        raise failure.interrupted
    if failure.code == _NO_MAIN_GUARD:
        problem = "the script starts processes while it is being imported by one of them"
        guard = "if __name__ == '__main__': (see docs/trouble.md#the-main-guard-is-missing)"
        raise UserError(f"{problem}; put the call under: {guard}")
    if failure.rank < 0:
        # Behave as if there were no watcher: run Python's default handler, or the user's.
        signal.raise_signal(failure.code - 128)
    if failure.problems:
        raise user_error(failure.problems, failure.code)
    raised, original = failures.RankError(failure.message), None
    with contextlib.suppress(Exception):  # none was kept, or its class takes other arguments
        original = pickle.loads((directory / f"error-{failure.rank}").read_bytes())  # noqa: S301
    if isinstance(original, Exception):
        raise original from raised
    raise raised
