"""The server of ``parameter_server``: one thread, which steps with the gradients of workers.

Source of the bounded staleness: Ho et al. 2013 (https://papers.nips.cc/paper/4894).
"""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..clipping import clip_gradients
from .links import NOTHING, SERVER, Kind, Link, LinkError, pack, unpack

# How often a waiting worker hears that the server is alive.
_BEAT_SECONDS = 5.0


@dataclass
class Worker:
    """A worker, as the server sees it."""

    rank: int
    version: int | None = None
    """Steps that the server had made when it sent the weights on which the worker computes;
    ``None`` if it computes nothing."""
    started: int = 0
    """Steps that it has started."""
    gradients: list[Tensor | None] | None = None
    """Set while it waits for a step; ``None`` in it for parameters that it has not used."""
    clipping: Sequence[float] = ()
    contribution: Tensor | None = None
    """Set while it waits for an exchange."""
    heard: float = field(default_factory=time.monotonic)

    @property
    def waits(self) -> bool:
        """Whether it waits for an answer."""
        return self.gradients is not None or self.contribution is not None


class Server:
    """Holds parameters, steps them with the gradients of workers, and sends them.

    Args:
        store: For the links.
        workers: Number of workers.
        max_staleness: As of the strategy.
        timeout: Seconds after which a worker is lost, if it is silent and others wait for it.
    """

    def __init__(
        self, store: dist.Store, workers: int, max_staleness: int | None, timeout: float
    ) -> None:
        self._store, self._bound, self._timeout = store, max_staleness, timeout
        self._links: dict[int, Link] = {}
        self._workers = {rank: Worker(rank) for rank in range(workers)}
        self._world_size = workers
        self._inbox: queue.SimpleQueue[tuple[int, Kind, Sequence[float], Tensor]]
        self._inbox = queue.SimpleQueue()
        self._parameters: Sequence[Tensor] = ()
        self._optimizers: Sequence[Optimizer] = ()
        self._version = 0
        self._staleness: dict[int, list[int]] = {}
        self._stop = (0, 0)
        self._failure: BaseException | None = None
        for rank in range(workers):
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    def hold(self, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Serve parameters, which the optimizers step; called while no worker asks for them."""
        self._parameters, self._optimizers = parameters, optimizers

    def staleness(self) -> dict[str, float]:
        """Mean over the gradients applied since the last call, and each worker's maximum."""
        found, self._staleness = self._staleness, {}
        steps = [each for own in found.values() for each in own]
        largest = {f"staleness_max/rank-{rank}": float(max(found[rank])) for rank in sorted(found)}
        return {"staleness": sum(steps) / len(steps), **largest} if steps else {}

    def failed(self) -> BaseException | None:
        """Why the server has failed, if it has."""
        return self._failure

    def close(self) -> None:
        """Wait until all workers have left or are lost."""
        self._thread.join(self._timeout)

    def _read(self, rank: int) -> None:
        kind = Kind.WAIT
        try:
            self._links[rank] = Link(self._store, rank, SERVER, self._timeout)
            while kind is not Kind.LEAVE:
                kind, numbers, content = self._links[rank].receive()
                self._inbox.put((rank, kind, numbers, content))
        except LinkError:
            self._inbox.put((rank, Kind.LOST, (), NOTHING))

    def _answer(
        self, rank: int, kind: Kind, numbers: Sequence[float] = (), content: Tensor = NOTHING
    ) -> None:
        if rank in self._workers:
            self._workers[rank].heard = time.monotonic()
        with contextlib.suppress(LinkError):  # its reader tells that it is lost
            self._links[rank].send(kind, numbers, content)

    def _run(self) -> None:
        try:
            while self._workers:
                try:
                    message = self._inbox.get(timeout=min(_BEAT_SECONDS, self._timeout / 4))
                except queue.Empty:
                    self._beat()
                else:
                    self._take(*message)
                while group := self._next_group():
                    self._step_with(group)
                self._exchange_if_due()
        except BaseException as error:
            self._failure = error
            for rank in self._links:
                self._answer(rank, Kind.FAILED)

    def _take(self, rank: int, kind: Kind, numbers: Sequence[float], content: Tensor) -> None:
        worker = self._workers.get(rank)
        if worker is None:  # lost before, when it was silent
            if kind not in (Kind.LEAVE, Kind.LOST):
                self._answer(rank, Kind.FAILED)
        elif kind is Kind.LEAVE:
            del self._workers[rank]
        elif kind is Kind.LOST:
            self._lose(worker)
        elif kind is Kind.PULL:
            if numbers[0]:
                worker.version, worker.started = self._version, worker.started + 1
            self._answer(rank, kind, (), pack(self._parameters))
        elif kind is Kind.STEP:
            worker.gradients, worker.clipping = self._unpack_gradients(content), numbers
        elif kind is Kind.EXCHANGE:
            worker.contribution = content
        else:
            if not self._stop[0]:
                # One more: a worker may have begun it without asking for weights yet.
                last = max(each.started for each in self._workers.values()) + 1
                self._stop = int(numbers[0]), last
            self._answer(rank, kind, self._stop)

    def _unpack_gradients(self, content: Tensor) -> list[Tensor | None]:
        used, content = content.tensor_split([len(self._parameters)])
        pairs = zip(self._parameters, used.tolist(), strict=True)
        found = iter(unpack(content, [each for each, is_used in pairs if is_used]))
        return [next(found) if is_used else None for is_used in used.tolist()]

    def _beat(self) -> None:
        """Tell those who wait that the server is alive; lose those who are silent meanwhile."""
        now, workers = time.monotonic(), list(self._workers.values())
        for worker in [each for each in workers if each.waits]:
            self._answer(worker.rank, Kind.WAIT)
        for worker in workers if any(each.waits for each in workers) else ():
            if now - worker.heard > self._timeout:
                self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        if worker.rank == 0:
            raise LinkError(f"rank 0 was silent for {self._timeout:g} s while others waited")
        del self._workers[worker.rank]
        if 0 not in self._workers:  # it has left: the run ends
            return
        left = len(self._workers)
        others = f"the other {left} workers continue" if left > 1 else "1 worker continues"
        line = f"note: rank {worker.rank} was lost in its step {worker.started}; {others}\n"
        sys.stderr.write(line)
        sys.stderr.flush()

    def _exchange_if_due(self) -> None:
        given = {rank: self._workers[rank].contribution for rank in sorted(self._workers)}
        parts = [each for each in given.values() if each is not None]
        if not parts or len(parts) < len(given):
            return
        sizes = torch.full((self._world_size,), -1, dtype=torch.int64)
        sizes[list(given)] = torch.tensor([each.numel() for each in parts])
        content = torch.cat([sizes.view(torch.uint8), *parts])
        for worker in self._workers.values():
            worker.contribution = None
            self._answer(worker.rank, Kind.EXCHANGE, (), content)

    # --- steps -----------------------------------------------------------------------------------

    def _next_group(self) -> list[Worker]:
        """The workers whose gradients make the next step; none if a worker must be waited for.

        A step with one gradient is made as soon as no other worker's weights become older by it
        than the bound. Those that would are waited for, and then averaged into one step. With a
        bound of 0 these are all workers.
        """
        workers = [self._workers[rank] for rank in sorted(self._workers)]
        ready = [each for each in workers if each.gradients is not None]
        needed = [each for each in workers if self._is_at_bound(each)]
        if ready and needed:
            return needed if all(each.gradients is not None for each in needed) else []
        return ready[:1]

    def _is_at_bound(self, worker: Worker) -> bool:
        if not self._bound:
            return self._bound == 0
        return worker.version is not None and self._version - worker.version >= self._bound

    def _step_with(self, group: Sequence[Worker]) -> None:
        """Step with the average of some workers' gradients, and answer them."""
        for index, parameter in enumerate(self._parameters):
            parameter.grad = _average([(each.gradients or [])[index] for each in group])
        has_gradients = any(each.grad is not None for each in self._parameters)
        norm = self._clip(*group[0].clipping[:2]) if has_gradients else -1.0
        for optimizer in self._optimizers if has_gradients else ():
            optimizer.step()
        for worker in group:
            started = self._version if worker.version is None else worker.version
            self._staleness.setdefault(worker.rank, []).append(self._version - started)
            worker.version = worker.gradients = None
        # Before the answers: a worker may read the number of steps when it has one.
        self._version += has_gradients
        for worker in group:
            self._answer(worker.rank, Kind.STEP, (*self._stop, norm))

    def _clip(self, most: float, largest: float) -> float:
        norm = clip_gradients(self._parameters, most, "norm") if most >= 0 else None
        if largest < torch.inf:
            clip_gradients(self._parameters, largest, "value")
        return -1.0 if norm is None else float(norm)


def _average(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Of one parameter, in the order of ranks; a worker that has not used it counts as 0."""
    found = [each for each in gradients if each is not None]
    if not found or len(gradients) == 1:
        return found[0] if found else None
    total = found[0].clone()
    for each in found[1:]:
        total += each
    return total.div_(len(gradients))
