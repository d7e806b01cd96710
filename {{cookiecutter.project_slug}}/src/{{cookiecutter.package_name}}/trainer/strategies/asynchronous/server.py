"""A parameter server: holds parameters, steps with the gradients of workers, and sends weights.

Workers are served by one thread each; all of them work on the server's state under one lock.

Source: the parameter server of Li et al. 2014 (https://www.usenix.org/conference/osdi14/
technical-sessions/presentation/li_mu), with bounded staleness (Ho et al. 2013, SSP).
"""

import contextlib
import math
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import UserError
from ..clipping import clip_gradients
from .wire import Connection, Kind, Packing, WrongSecretError, as_bytes, pack_by_rank

STEP = struct.Struct("!dd")
"""Factor of the gradients, and the largest absolute value of an element."""
STEPPED = struct.Struct("!QIQ")
"""Staleness of the gradients; the signal on which all stop, or 0, and after which step."""
NORM = struct.Struct("!d")
SIGNAL = struct.Struct("!I")
_Answer = bytes | memoryview
# How often a waiting worker hears that the server is alive.
_BEAT_SECONDS = 5.0


@dataclass
class Worker:
    """A worker, as the server sees it.

    ``version``: steps that the server had made when it sent the weights on which the worker
    computes; ``None`` if it computes nothing. ``waits``: whether it waits for an answer.
    """

    rank: int
    connection: Connection
    version: int | None = None
    started: int = 0
    """Steps that it has started."""
    gradients: list[Tensor | None] | None = None
    settings: tuple[float, float] | None = None
    """Set once it asks for the step: see :data:`STEP`."""
    contribution: bytes | None = None
    waits: bool = False
    heard: float = field(default_factory=time.monotonic)
    staleness: int = 0


class Staleness:
    """Staleness of the gradients that were applied since it was last read, by rank."""

    def __init__(self) -> None:
        self._found: dict[int, list[int]] = {}

    def note(self, rank: int, steps: int) -> None:
        """Record the staleness of a gradient, in optimizer steps."""
        self._found.setdefault(rank, []).append(steps)

    def take(self) -> dict[str, float]:
        """Mean over all gradients, and each worker's maximum, to log; then start anew."""
        found, self._found = self._found, {}
        steps = [each for own in found.values() for each in own]
        if not steps:
            return {}
        largest = {f"staleness_max/rank-{rank}": float(max(found[rank])) for rank in sorted(found)}
        return {"staleness": sum(steps) / len(steps), **largest}


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
        self.staleness = Staleness()
        self._index, self._expected, self._secret = index, workers, secret
        self._servers = servers
        self._bound, self._timeout = max_staleness, timeout
        self._parameters: list[Tensor] = []
        self._optimizers: Sequence[Optimizer] = ()
        self._packing, self._weights = Packing([]), torch.zeros(0, dtype=torch.uint8)
        self._changed = threading.Condition()
        self._workers: dict[int, Worker] = {}
        self._joined: set[int] = set()
        self._version = 0
        self._exchanges, self._exchanged = 0, b""
        self._norm_of, self._squared_norm = (-1, 0), 0.0
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
            self._parameters, self._optimizers = list(parameters), optimizers
            self._packing, self._weights = Packing(parameters), weights

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
                left = len(self._workers)
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
            worker.version = self._version
            worker.started += 1
            return self._copy()

    def _peek(self, worker: Worker, content: bytearray) -> _Answer:
        with self._changed:
            return self._copy()

    def _copy(self) -> memoryview:
        return as_bytes(self._weights.clone())

    def _take_gradients(self, worker: Worker, content: bytearray) -> None:
        count = len(self._parameters)
        tensors = self._packing.read(content, offset=_padded(count))
        present = content[:count]
        found = [
            each if is_present else None for each, is_present in zip(tensors, present, strict=True)
        ]
        with self._changed:
            worker.gradients = found
            self._changed.notify_all()

    def _norm(self, worker: Worker, content: bytearray) -> bytes:
        with self._changed:
            self._wait(worker, lambda: self._all_joined and self._have_all_gradients())
            if self._norm_of != (self._version, len(self._workers)):
                self._norm_of = self._version, len(self._workers)
                averages = self._averages([self._workers[rank] for rank in sorted(self._workers)])
                norms = [each.double().norm().item() for each in averages if each is not None]
                self._squared_norm = sum(norm**2 for norm in norms)
            return NORM.pack(self._squared_norm)

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
        while group := self._next_group():
            self._step_with(group)
            self._changed.notify_all()

    def _next_group(self) -> list[Worker]:
        """The workers whose gradients make the next step; none if a worker must be waited for.

        A step with one gradient is made as soon as no other worker's weights become older by it
        than the bound. Those that would are waited for, and then averaged into one step. With a
        bound of 0 these are all workers.
        """
        workers = [self._workers[rank] for rank in sorted(self._workers)]
        ready = [each for each in workers if each.settings is not None]
        if not ready:
            return []
        needed = [each for each in workers if self._is_at_bound(each)]
        if needed:
            is_due = self._all_joined and all(each.settings is not None for each in needed)
            return needed if is_due else []
        return ready[:1]

    def _is_at_bound(self, worker: Worker) -> bool:
        if self._bound is None:
            return False
        if self._bound == 0:
            return True
        return worker.version is not None and self._version - worker.version >= self._bound

    def _step_with(self, group: list[Worker]) -> None:
        """Step with the average of some workers' gradients."""
        averages = self._averages(group)
        factor, largest = group[0].settings or (1.0, math.inf)
        has_stepped = any(each is not None for each in averages)
        if has_stepped:
            for parameter, average in zip(self._parameters, averages, strict=True):
                parameter.grad = average
            if largest < math.inf:
                clip_gradients(self._parameters, largest, "value")
            for parameter in self._parameters:
                if parameter.grad is not None and factor != 1.0:
                    parameter.grad.mul_(factor)
            for optimizer in self._optimizers:
                optimizer.step()
            for parameter in self._parameters:
                parameter.grad = None
        for worker in group:
            started = self._version if worker.version is None else worker.version
            worker.staleness = self._version - started
            self.staleness.note(worker.rank, worker.staleness)
            worker.version, worker.gradients, worker.settings = None, None, None
        self._version += has_stepped

    def _averages(self, group: list[Worker]) -> list[Tensor | None]:
        """The average gradient of each parameter; a worker that has not used it counts as 0."""
        return [
            _average([each.gradients[index] for each in group if each.gradients], len(group))
            for index in range(len(self._parameters))
        ]


class _FailedError(Exception):
    """Another worker's thread has failed; the worker has been told."""


def _average(gradients: Sequence[Tensor | None], count: int) -> Tensor | None:
    """In the order of ranks, so that each run sums in the same one."""
    found = [each for each in gradients if each is not None]
    if not found:
        return None
    if count == 1:
        return found[0]
    total = found[0].clone()
    for each in found[1:]:
        total += each
    return total.div_(count)


def _padded(count: int) -> int:
    """Bytes before the gradients: one for each parameter, whether it has one."""
    return -(-count // 64) * 64


def present_bytes(gradients: Sequence[Tensor | None]) -> bytes:
    """What a worker sends before its gradients."""
    flags = bytes(each is not None for each in gradients)
    return flags.ljust(_padded(len(flags)), b"\0")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
