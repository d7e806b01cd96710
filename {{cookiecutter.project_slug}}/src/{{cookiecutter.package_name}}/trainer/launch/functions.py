"""The launchers of ``ddp_spawn`` and ``ddp_fork``: a function, run once a rank in new processes.

What the function returns on rank 0 comes back to the process that called it.
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

# The exit code of a process that has found itself to be started again: nobody else's.
_UNGUARDED = 113

_Given = Path | Callable[[], object]
"""The work itself, or a file that it is pickled in."""


def run_in_processes(
    method: Method, processes: int, work: Callable[[], Result], names: dict[str, Any]
) -> Result:
    """Run a function once a rank, in processes of their own, and watch them.

    Args:
        method: ``"spawn"`` pickles the function; ``"fork"`` copies this process.
        processes: ranks to start on this node.
        work: what each runs, with the variables set by which a rank knows its place. It writes down
            its own failure (:func:`~.external.run_external`).
        names: what ``work`` refers to, by the user's name for it: for an error in pickling.

    Returns:
        what it returned on rank 0.

    Raises:
        UserError: it cannot be started so, or a rank found a mistake of the user's.
        RankError: a rank failed.
        KeyboardInterrupt: this process was sent SIGINT, and the ranks have ended: an
            :class:`~..interruption.Interrupted` where they have saved.
    """
    _check_can_start(method, names)
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    inbox = _Inbox(receiver)
    # That only this user can open: the ranks' store is in it.
    with tempfile.TemporaryDirectory(prefix="trainer-launch-") as directory:
        place = Place(processes, Path(directory))
        given = work if method == "fork" else _written(work, names, Path(directory))
        ranks = []
        for rank in range(processes):
            arguments = (given, place.variables(rank), sender if rank == 0 else None)
            ranks.append(context.Process(target=_run_rank, args=arguments))

        def start() -> list[_Started]:
            _start(ranks, threads_each(processes) if method == "spawn" else None)
            sender.close()
            inbox.open()  # a thread, which a fork would not copy
            return [_Started(rank) for rank in ranks]

        failure = Watcher(start, method, place).watch()
        inbox.close()
    if failure is not None:
        raise _exception(failure)
    result: Result = inbox.take()
    return result


def _check_can_start(method: Method, names: dict[str, Any]) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(_UNGUARDED)  # the process that started this one says it, once for all
    if method == "fork" and torch.cuda.is_initialized():
        raise UserError(
            "processes cannot be forked: CUDA is initialized in this one already (a .cuda(), "
            ".to('cuda') or torch.cuda call before fit); restart it and leave devices to the "
            "trainer, or use strategy='ddp_spawn'"
        )
    shared = _shared_tensor(names) if method == "fork" else None
    if shared is not None:
        raise UserError(
            f"{shared} lies in shared memory, into which all forked processes would write; train "
            "a copy.deepcopy of the model, or use strategy='ddp_spawn'"
        )


def _shared_tensor(names: dict[str, Any]) -> str | None:
    """The path of a weight that a forked process would not have to itself."""
    for name, value in names.items():
        for path, tensor in value.state_dict().items() if isinstance(value, nn.Module) else ():
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and tensor.is_shared():
                return f"{name}.{path}"
    return None


def _written(work: Callable[[], object], names: dict[str, Any], directory: Path) -> Path:
    pickled = _pickled(work, names)
    _check_can_be_imported(pickled)
    # Not by multiprocessing's pipe: each process would be started when the one before it has read
    # its part, which is after all its imports.
    path = directory / "work"
    path.write_bytes(pickled)
    return path


def _pickled(value: object, names: dict[str, Any]) -> bytes:
    # By value: torch's own pickler would have all ranks share one set of weights, and a rank
    # outlive what it sends.
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
    # A script is imported by its path, "<stdin>" too, even where nothing of it is needed.
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
    """Have processes that are started meanwhile compute on so many threads."""
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
    """A process of multiprocessing, as a watcher looks at it."""

    process: BaseProcess

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def poll(self) -> int | None:
        return self.process.exitcode


def _run_rank(given: _Given, variables: dict[str, str], sender: Connection | None) -> None:
    """What a new process does: take its place, work, and send back what came of it."""
    os.setpgid(0, 0)
    if os.getppid() != int(variables[PARENT]):
        sys.exit("the process that started this rank is gone")
    os.environ.update(variables)
    if not isinstance(given, Path):
        # OpenMP's threads do not survive a fork; a region with more than one would wait for them.
        torch.set_num_threads(1)
        # What is to be done at the parent's exit: multiprocessing itself does so from 3.13 on.
        atexit._clear()
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    try:
        run = run_external(lambda: _function(given))
        result = run()
        if sender is not None:
            run_external(lambda: sender.send_bytes(_pickled(result, {"outcome": result})))
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(EXIT_CODE)
    except BaseException:
        # It is written down; multiprocessing would print it a second time.
        sys.exit(1)


def _function(given: _Given) -> Callable[[], object]:
    if not isinstance(given, Path):
        return given
    # Only what the parent itself pickled a moment ago.
    found: Callable[[], object] = pickle.loads(given.read_bytes())  # noqa: S301
    return found


class _Inbox:
    """Takes what rank 0 sends, in a thread, so that a large result does not block it."""

    def __init__(self, receiver: Connection) -> None:
        self._receiver = receiver
        self._content: bytes | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def open(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Wait until rank 0 has sent all, or has ended."""
        self._thread.join(timeout=10)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._content = self._receiver.recv_bytes()

    def take(self) -> Any:
        """What was sent."""
        if self._content is None:
            raise RankError("rank 0 ended without a result")
        return pickle.loads(self._content)  # noqa: S301


def _exception(failure: Failure) -> BaseException:
    if failure.interrupted is not None:
        return failure.interrupted
    if failure.rank < 0:
        # As if the watcher had not been there: Python's own answer, or the user's.
        signal.raise_signal(failure.code - 128)
    if failure.code == _UNGUARDED:
        return UserError(
            "the script starts processes while it is being imported by one of them; put the call "
            "under: if __name__ == '__main__':"
        )
    if failure.is_user_error:
        return UserError(failure.lines)
    return RankError(failure.message)
