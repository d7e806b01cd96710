"""A parameter server: holds parameters, steps with the gradients of workers, and sends weights.

Workers are served by one thread each; all of them work on the server's state under one lock.

Source: the parameter server of Li et al. 2014 (https://www.usenix.org/conference/osdi14/
technical-sessions/presentation/li_mu).
"""

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from ...errors import UserError
from .steps import Steps, Worker
from .wire import Connection, Kind, WrongSecretError, pack_by_rank

STEP = struct.Struct("!dd")
"""Factor of the gradients, and the largest absolute value of an element."""
STEPPED = struct.Struct("!QIQ")
"""Staleness of the gradients; the signal on which all stop, or 0, and after which step."""
NORM = struct.Struct("!d")
SIGNAL = struct.Struct("!I")
_Answer = bytes | memoryview
# How often a waiting worker hears that the server is alive.
_BEAT_SECONDS = 5.0


class Server:
    """Serves the workers of a run.

    Args:
        index: Index of the server. The first one also carries collectives, and tells of losses.
        workers: Number of workers.
        secret: The run's secret.
        max_staleness: Steps that the server may make between sending a worker its weights and
            applying the gradient that the worker has computed on them. 0: it averages the gradients
            of all workers in each step; ``None``: unlimited.
        timeout: Seconds after which a worker is lost, if it is silent and others wait for it.
        servers: Number of servers: the workers on whose ranks they are cannot be lost.
    """

    def __init__(
        self,
        index: int,
        workers: int,
        secret: bytes,
        max_staleness: int | None,
        timeout: float,
        servers: int = 1,
    ) -> None:
        self._index, self._expected, self._secret = index, workers, secret
        self._servers = servers
        self._timeout = timeout
        self._changed = threading.Condition()
        self._workers: dict[int, Worker] = {}
        self.steps = Steps(self._workers, max_staleness)
        self._joined: set[int] = set()
        self._exchanges, self._exchanged = 0, b""
        self._stop = (0, 0)
        self._closing = False
        self._began = time.monotonic()
        self.failure: BaseException | None = None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=workers + 16)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="server", daemon=True).start()

    def serve(
        self, parameters: Sequence[Tensor], weights: Tensor, optimizers: Sequence[Optimizer]
    ) -> None:
        """Serve parameters from now on.

        Args:
            parameters: This server's, which are views of ``weights``.
            weights: A buffer of bytes.
            optimizers: Step them.
        """
        with self._changed:
            self.steps.hold(parameters, weights, optimizers)

    def locked(self) -> threading.Condition:
        """Context in which no step is made."""
        return self._changed

    def close(self) -> None:
        """Wait until all workers have left or are lost, and close."""
        with self._changed:
            self._closing = True
            deadline = time.monotonic() + self._timeout
            while self._workers and time.monotonic() < deadline:
                self._changed.wait(1.0)
            rest = list(self._workers.values())
        self._listener.close()
        for worker in rest:
            worker.connection.interrupt()

    # --- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        connection = Connection(connected)
        try:
            rank = connection.accept(self._secret)
        except WrongSecretError:
            connection.close()
            _say("note: the parameter server refused a connection that does not know the secret")
            return
        except (OSError, ValueError):
            connection.close()
            return
        connection.patience(None)
        worker = Worker(rank, connection)
        with self._changed:
            is_new = rank < self._expected and rank not in self._joined
            if is_new:
                self._joined.add(rank)
                self._workers[rank] = worker
                self._changed.notify_all()
        if is_new:
            self._serve_worker(worker)
        connection.close()

    def _serve_worker(self, worker: Worker) -> None:
        """Serve a worker to its end; an error of the server ends all workers."""
        try:
            try:
                left = self._converse(worker)
            except (OSError, _FailedError):
                left = False
            self._remove(worker, is_lost=not left)
        except BaseException as error:
            self._fail(worker, error)

    def _converse(self, worker: Worker) -> bool:
        """Answer a worker's messages; return True when it leaves as intended."""
        while True:
            kind, content = worker.connection.receive()
            worker.heard = time.monotonic()
            if kind is Kind.LEAVE:
                return True
            if kind is Kind.GRADIENTS:
                self._take_gradients(worker, content)
                continue
            worker.waits = True
            answer = self._answers[kind](self, worker, content)
            worker.heard, worker.waits = time.monotonic(), False
            worker.connection.send(kind, answer)

    def _remove(self, worker: Worker, *, is_lost: bool) -> None:
        with self._changed:
            self._workers.pop(worker.rank, None)
            self._changed.notify_all()
            if self.failure is not None:
                return
            is_told = self._index == 0 and worker.rank >= self._servers
            if is_lost and is_told and not self._closing:
                # Others may not have joined yet.
                left = len(self._workers) + self._expected - len(self._joined)
                others = f"the other {left} workers continue" if left > 1 else "1 worker continues"
                _say(f"note: rank {worker.rank} was lost in its step {worker.started}; {others}")
            self._step_if_due()
            self._exchange_if_due()

    def _fail(self, worker: Worker, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._workers.pop(worker.rank, None)
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # the worker has ended too
            worker.connection.send(Kind.FAILED)

    def _wait(self, worker: Worker, is_due: Callable[[], bool]) -> None:
        """Wait under the lock; tell the worker from time to time that the server is alive."""
        beat = min(_BEAT_SECONDS, self._timeout / 4)
        while not is_due():
            if self.failure is not None:
                worker.connection.send(Kind.FAILED)
                raise _FailedError
            if not self._changed.wait(beat):
                self._drop_silent()
                worker.connection.send(Kind.WAIT)

    def _drop_silent(self) -> None:
        """Close the connections of workers that are silent while others wait for them."""
        now = time.monotonic()
        if len(self._joined) < self._expected and now - self._began > self._timeout:
            ranks = sorted(set(range(self._expected)) - self._joined)
            names = ", ".join(map(str, ranks))
            raise UserError(
                f"rank {names} did not join within {self._timeout:g} s (timeout_seconds of the "
                "strategy)"
            )
        for worker in self._workers.values():
            if not worker.waits and now - worker.heard > self._timeout:
                worker.connection.interrupt()

    # --- answers, each under the lock ------------------------------------------------------------

    def _pull(self, worker: Worker, content: bytearray) -> _Answer:
        with self._changed:
            worker.version = self.steps.version
            worker.started += 1
            return self.steps.weights()

    def _peek(self, worker: Worker, content: bytearray) -> _Answer:
        with self._changed:
            return self.steps.weights()

    def _take_gradients(self, worker: Worker, content: bytearray) -> None:
        found = self.steps.read_gradients(content)
        with self._changed:
            worker.gradients = found
            self._changed.notify_all()

    def _norm(self, worker: Worker, content: bytearray) -> bytes:
        with self._changed:
            self._wait(worker, lambda: self._all_joined and self._have_all_gradients())
            return NORM.pack(self.steps.squared_norm())

    def _have_all_gradients(self) -> bool:
        return all(each.gradients is not None for each in self._workers.values())

    def _step(self, worker: Worker, content: bytearray) -> bytes:
        factor, largest = STEP.unpack(content)
        with self._changed:
            worker.settings = factor, largest
            self._step_if_due()
            self._wait(worker, lambda: worker.settings is None)
            return STEPPED.pack(worker.staleness, *self._stop)

    def _exchange(self, worker: Worker, content: bytearray) -> bytes:
        with self._changed:
            worker.contribution, before = bytes(content), self._exchanges
            self._exchange_if_due()
            self._wait(worker, lambda: self._exchanges > before)
            # The next exchange needs this worker, so this is still the result of its own.
            return self._exchanged

    def _signal(self, worker: Worker, content: bytearray) -> bytes:
        with self._changed:
            if self._stop == (0, 0):
                # One more: a worker may have begun it without asking for weights yet.
                last = max(each.started for each in self._workers.values()) + 1
                self._stop = (SIGNAL.unpack(content)[0], last)
            return STEPPED.pack(0, *self._stop)

    _answers: ClassVar[Mapping[Kind, Callable[["Server", Worker, bytearray], _Answer]]] = {
        Kind.PULL: _pull,
        Kind.PEEK: _peek,
        Kind.NORM: _norm,
        Kind.STEP: _step,
        Kind.EXCHANGE: _exchange,
        Kind.SIGNAL: _signal,
    }

    # --- what all workers wait for, under the lock -----------------------------------------------

    @property
    def _all_joined(self) -> bool:
        return len(self._joined) == self._expected

    def _exchange_if_due(self) -> None:
        workers = self._workers.values()
        if not (workers and self._all_joined):
            return
        parts = {each.rank: each.contribution for each in workers}
        given = {rank: part for rank, part in parts.items() if part is not None}
        if len(given) < len(parts):
            return
        self._exchanged = pack_by_rank(given)
        self._exchanges += 1
        for each in workers:
            each.contribution = None
        self._changed.notify_all()

    def _step_if_due(self) -> None:
        while self._all_joined and (group := self.steps.next_group()):
            self.steps.step_with(group)
            self._changed.notify_all()


class _FailedError(Exception):
    """Another worker's thread has failed; the worker has been told."""


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
