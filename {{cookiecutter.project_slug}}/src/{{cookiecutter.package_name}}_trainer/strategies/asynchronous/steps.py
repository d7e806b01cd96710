"""Which gradients make the next step of a parameter server, and the step itself.

Source of the bounded staleness: Ho et al. 2013 (https://papers.nips.cc/paper/4894).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..clipping import clip_gradients
from .wire import Connection, Packing, as_bytes


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
        """Mean over all gradients, and each worker's maximum, to log; then reset them."""
        found, self._found = self._found, {}
        steps = [each for own in found.values() for each in own]
        if not steps:
            return {}
        largest = {f"staleness_max/rank-{rank}": float(max(found[rank])) for rank in sorted(found)}
        return {"staleness": sum(steps) / len(steps), **largest}


class Steps:
    """The parameters of a server, and the steps that it makes with the gradients of workers.

    The server calls all methods under its lock.

    Args:
        workers: Workers that are not lost, by rank: the server's own dict.
        bound: The server's ``max_staleness``.
    """

    def __init__(self, workers: Mapping[int, Worker], bound: int | None) -> None:
        self.staleness = Staleness()
        self.version = 0
        """Number of steps so far."""
        self._workers, self._bound = workers, bound
        self._parameters: list[Tensor] = []
        self._optimizers: Sequence[Optimizer] = ()
        self._packing, self._weights = Packing([]), torch.zeros(0, dtype=torch.uint8)
        self._norm_of, self._squared_norm = (-1, 0), 0.0

    def hold(
        self, parameters: Sequence[Tensor], weights: Tensor, optimizers: Sequence[Optimizer]
    ) -> None:
        """See :meth:`~.server.Server.serve`."""
        self._parameters, self._optimizers = list(parameters), optimizers
        self._packing, self._weights = Packing(parameters), weights

    def weights(self) -> memoryview:
        """A copy of the weights."""
        return as_bytes(self._weights.clone())

    def read_gradients(self, content: bytearray) -> list[Tensor | None]:
        """The gradients in a worker's message; ``None`` for parameters that it has not used."""
        count = len(self._parameters)
        tensors = self._packing.read(content, offset=_padded(count))
        return [
            each if is_present else None
            for each, is_present in zip(tensors, content[:count], strict=True)
        ]

    def squared_norm(self) -> float:
        """Of the average of all workers' gradients."""
        if self._norm_of != (self.version, len(self._workers)):
            self._norm_of = self.version, len(self._workers)
            averages = self._averages([self._workers[rank] for rank in sorted(self._workers)])
            norms = [each.double().norm().item() for each in averages if each is not None]
            self._squared_norm = sum(norm**2 for norm in norms)
        return self._squared_norm

    def next_group(self) -> list[Worker]:
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
            return needed if all(each.settings is not None for each in needed) else []
        return ready[:1]

    def _is_at_bound(self, worker: Worker) -> bool:
        if self._bound is None:
            return False
        if self._bound == 0:
            return True
        return worker.version is not None and self.version - worker.version >= self._bound

    def step_with(self, group: list[Worker]) -> None:
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
            started = self.version if worker.version is None else worker.version
            worker.staleness = self.version - started
            self.staleness.note(worker.rank, worker.staleness)
            worker.version, worker.gradients, worker.settings = None, None, None
        self.version += has_stepped
        self._norm_of = (-1, 0)

    def _averages(self, group: list[Worker]) -> list[Tensor | None]:
        """The average gradient of each parameter; a worker that has not used it counts as 0."""
        return [
            _average([each.gradients[index] for each in group if each.gradients], len(group))
            for index in range(len(self._parameters))
        ]


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
