"""The launchers of ``ddp_spawn`` and ``ddp_fork``: a function, run once a rank in new processes.

What the function returns on rank 0 comes back to the process that called it.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from .. import rendezvous
from ..errors import UserError
from ..pickling import find_unpicklable
from .external import run_external
from .failures import Failure, RankError
from .watcher import Watcher, rank_variables, threads_each

Result = TypeVar("Result")
Method = Literal["spawn", "fork"]


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
    """
    _check_can_start(method)
    payload = _pickled(work, names) if method == "spawn" else work
    context = multiprocessing.get_context(method)
    store = rendezvous.loopback_store()
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="trainer-failures-") as directory:
        started = []
        with _threads(threads_each(processes) if method == "spawn" else None):
            for rank in range(processes):
                variables = rank_variables(rank, processes, store.port, directory)
                arguments = (payload, variables, sender if rank == 0 else None)
                process = cast(Any, context).Process(target=_run_rank, args=arguments)
                process.start()
                started.append(_Started(process))
        sender.close()
        with _Inbox(receiver) as inbox:
            failure = Watcher(started, Path(directory)).watch()
    if failure is not None:
        raise _exception(failure)
    result: Result = inbox.take()
    return result


def _check_can_start(method: Method) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "the script starts processes while it is being imported by one of them; put the call "
            "under: if __name__ == '__main__':"
        )
    if method == "fork" and torch.cuda.is_initialized():
        raise UserError(
            "processes cannot be forked: CUDA is initialised in this one already (a .cuda(), "
            ".to('cuda') or torch.cuda call before fit); restart it and leave devices to the "
            "trainer, or use strategy='ddp_spawn'"
        )


def _pickled(work: Callable[[], object], names: dict[str, Any]) -> bytes:
    # Once and by value: torch's own pickler would have all ranks share one set of weights.
    try:
        return pickle.dumps(work)
    except Exception as error:
        found = (find_unpicklable(value, name) for name, value in names.items())
        line = next((each for each in found if each is not None), None)
        raise UserError(line or f"cannot be pickled for other processes: {error}") from error


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


def _run_rank(
    payload: bytes | Callable[[], object], variables: dict[str, str], sender: Connection | None
) -> None:
    """What a new process does: take its place, work, and send back what came of it."""
    os.setpgid(0, 0)
    os.environ.update(variables)
    if not isinstance(payload, bytes):
        # OpenMP's threads do not survive a fork; a region with more than one would wait for them.
        torch.set_num_threads(1)

    try:
        # Only what the parent itself pickled a moment ago.
        run = run_external(lambda: _function(payload))
        result = run()
        if sender is not None:
            # By value: torch's own way would need this process to outlive the transfer.
            run_external(lambda: sender.send_bytes(pickle.dumps(result)))
    except Exception:
        # It is written down; multiprocessing would print it a second time.
        sys.exit(1)


def _function(payload: bytes | Callable[[], object]) -> Callable[[], object]:
    if not isinstance(payload, bytes):
        return payload
    found: Callable[[], object] = pickle.loads(payload)  # noqa: S301
    return found


class _Inbox:
    """Takes what rank 0 sends, in a thread, so that a large result does not block it."""

    def __init__(self, receiver: Connection) -> None:
        import threading

        self._receiver = receiver
        self._content: bytes | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def __enter__(self) -> "_Inbox":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
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
    if failure.rank < 0:
        return KeyboardInterrupt(failure.message)
    if failure.is_user_error:
        return UserError(failure.lines)
    return RankError(failure.message)
