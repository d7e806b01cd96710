"""Launchers for ``ddp_spawn`` and ``ddp_fork``: run a function in new processes, once per rank.

The value that the function returns on rank 0 is sent back to the calling process.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..errors import UserError
from .external import run_external
from .failures.reports import PARENT, Failure, RankError
from .failures.watcher import Place, Watcher, threads_each
from .interruption import EXIT_CODE
from .pickling import find_unpicklable

Result = TypeVar("Result")
Method = Literal["spawn", "fork"]

# Exit code of a spawned process that tries to start the run again; used for nothing else.
_NO_MAIN_GUARD = 113

_Work = Path | Callable[[], object]
"""The function to run, or the path of the file that contains it pickled."""


def run_in_processes(
    method: Method, processes: int, work: Callable[[], Result], names: dict[str, Any]
) -> Result:
    """Run a function once per rank, each in its own process, and monitor the processes.

    Args:
        method: ``"spawn"`` pickles the function; ``"fork"`` copies this process.
        processes: Number of ranks to start on this node.
        work: The function to run. Environment variables give each rank its place. The function
            writes its own failure report (:func:`~.external.run_external`).
        names: Objects that ``work`` refers to, by the user's names; used in pickling errors.

    Returns:
        The return value of ``work`` on rank 0.

    Raises:
        UserError: The processes cannot be started this way, or a rank raised a ``UserError``.
        RankError: A rank failed.
        KeyboardInterrupt: This process received SIGINT and the ranks have ended: an
            :class:`~..interruption.Interrupted` if they have saved a checkpoint.
    """
    _check_can_start(method, names)
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    receiver_thread = _ResultReceiver(receiver)
    # Readable by this user only: it contains the store of the ranks.
    with tempfile.TemporaryDirectory(prefix="trainer-launch-") as directory:
        place = Place(processes, Path(directory))
        given = work if method == "fork" else _pickle_to_file(work, names, Path(directory))
        ranks = []
        for rank in range(processes):
            arguments = (given, place.variables(rank), sender if rank == 0 else None)
            ranks.append(context.Process(target=_run_rank, args=arguments))

        def start() -> list[_Started]:
            _start(ranks, threads_each(processes) if method == "spawn" else None)
            sender.close()
            receiver_thread.open()  # starts a thread, which a fork would not copy
            return [_Started(rank) for rank in ranks]

        failure = Watcher(start, method, place).watch()
        receiver_thread.close()
    if failure is not None:
        raise _exception(failure)
    result: Result = receiver_thread.take()
    return result


def _check_can_start(method: Method, names: dict[str, Any]) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(_NO_MAIN_GUARD)  # the parent process prints the message once for all ranks
    if method == "fork" and torch.cuda.is_initialized():
        raise UserError(
            "processes cannot be forked: CUDA is initialized in this one already (a .cuda(), "
            ".to('cuda') or torch.cuda call before fit); restart it and leave devices to the "
            "trainer, or use strategy='ddp_spawn'"
        )
    shared = _shared_tensor(names) if method == "fork" else None
    if shared is not None:
        raise UserError(
            f"{shared} is in shared memory, to which all forked processes would write; train "
            "a copy.deepcopy of the model, or use strategy='ddp_spawn'"
        )


def _shared_tensor(names: dict[str, Any]) -> str | None:
    """Path of a parameter in shared memory, which a forked process would not own."""
    for name, value in names.items():
        for path, tensor in value.state_dict().items() if isinstance(value, nn.Module) else ():
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.is_shared():
                return f"{name}.{path}"
    return None


def _pickle_to_file(work: Callable[[], object], names: dict[str, Any], directory: Path) -> Path:
    pickled = _pickled(work, names)
    _check_can_be_imported(pickled)
    # Not through multiprocessing's pipe: then each process would start only after the previous one
    # has finished all its imports and read its part.
    path = directory / "work"
    path.write_bytes(pickled)
    return path


def _pickled(value: object, names: dict[str, Any]) -> bytes:
    # Pickle by value: torch's own pickler would make all ranks share one set of weights, and would
    # require a rank to outlive the tensors that it sends.
    try:
        return pickle.dumps(value)
    except Exception as error:
        found = (find_unpicklable(each, name) for name, each in names.items())
        line = next((each for each in found if each is not None), None)
        raise UserError(line or f"cannot be pickled for other processes: {error}") from error


def _check_can_be_imported(pickled: bytes) -> None:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None or (path and Path(path).is_file()):
        return
    # A script is imported by its path, even "<stdin>", although nothing in it is needed.
    if path or b"__main__" in pickled:
        raise UserError(
            "processes that are spawned import the script, and this session (a notebook, "
            "python -c, standard input) has none; write it into a file, or use "
            "strategy='ddp_notebook'"
        )


def _start(ranks: Sequence[BaseProcess], threads: str | None) -> None:
    with _threads(threads):
        try:
            for rank in ranks:
                rank.start()
        except BaseException:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
            raise


@contextlib.contextmanager
def _threads(count: str | None) -> Iterator[None]:
    """Set the number of OpenMP threads of the processes started in this context."""
    if count is None or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = count
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@dataclass
class _Started:
    """A multiprocessing process, with the interface that the watcher needs."""

    process: BaseProcess

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def poll(self) -> int | None:
        return self.process.exitcode


def _run_rank(given: _Work, variables: dict[str, str], sender: Connection | None) -> None:
    """Entry point of a new process: set its environment, run the function, send the result."""
    os.setpgid(0, 0)
    if os.getppid() != int(variables[PARENT]):
        sys.exit("the process that started this rank has ended")
    os.environ.update(variables)
    if not isinstance(given, Path):
        # OpenMP threads do not survive a fork: a region with more than one thread would hang.
        torch.set_num_threads(1)
        # Drop the parent's atexit handlers: multiprocessing does this itself from Python 3.13 on.
        atexit._clear()
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    try:
        run = run_external(lambda: _load_work(given))
        result = run()
        if sender is not None:
            run_external(lambda: sender.send_bytes(_pickled(result, {"outcome": result})))
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(EXIT_CODE)
    except BaseException:
        # The failure report is written; multiprocessing would print the error a second time.
        sys.exit(1)


def _load_work(given: _Work) -> Callable[[], object]:
    if not isinstance(given, Path):
        return given
    # Safe: the parent process pickled this file itself.
    found: Callable[[], object] = pickle.loads(given.read_bytes())  # noqa: S301
    return found


class _ResultReceiver:
    """Receive the result of rank 0 in a thread, so that a large result does not block rank 0."""

    def __init__(self, receiver: Connection) -> None:
        self._receiver = receiver
        self._content: bytes | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def open(self) -> None:
        """Start the receiving thread."""
        self._thread.start()

    def close(self) -> None:
        """Wait until rank 0 has sent its result or has ended."""
        self._thread.join(timeout=10)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # take() reports that nothing came
            self._content = self._receiver.recv_bytes()

    def take(self) -> Any:
        """Return the received result."""
        if self._content is None:
            raise RankError("rank 0 ended without a result")
        return pickle.loads(self._content)  # noqa: S301


def _exception(failure: Failure) -> BaseException:
    if failure.interrupted is not None:
        return failure.interrupted
    if failure.rank < 0:
        # Behave as if there were no watcher: run Python's default handler, or the user's.
        signal.raise_signal(failure.code - 128)
    if failure.code == _NO_MAIN_GUARD:
        return UserError(
            "the script starts processes while it is being imported by one of them; put the call "
            "under: if __name__ == '__main__':"
        )
    if failure.is_user_error:
        return UserError(failure.lines)
    return RankError(failure.message)
