"""The server of ``parameter_server``: holds the weights, and steps with gradients as they arrive.

Source of the bounded staleness: Ho et al. 2013 (https://papers.nips.cc/paper/4894).
"""

import datetime
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...launch import reports
from ..clipping import clip_gradients

# Requests are tensors: the kind, two numbers, and which parameters were used.
_PULL, _STEP, _LEAVE = range(3)
_NUMBERS = 3
# Workers that do not step together meet when the slowest has made its steps of the epoch.
MOST_TO_MEET = datetime.timedelta(days=1)


class LostWorker(RuntimeError):
    """A worker has ended, or hangs."""


class Clipping(NamedTuple):
    """How the gradient of a step is clipped."""

    norm: float = -1.0
    """Maximum norm; infinite: only compute it; negative: neither."""
    value: float = torch.inf
    """Maximum value of an element."""


NO_CLIPPING = Clipping()


class Stepped(NamedTuple):
    """The answer to a gradient that has been applied."""

    norm: float
    """Norm of the step's gradient before clipping; -1 if it was not computed."""
    signal: int = 0
    """The signal on which all workers stop, or 0."""
    last: int = 0
    """After which of their steps they stop."""


@dataclass
class Worker:
    """A worker, as the server sees it."""

    version: int | None = None
    """Steps that the server had made when it gave the weights on which the worker computes;
    ``None`` if it computes nothing."""
    started: int = 0
    """Steps that it has started."""
    gradients: Sequence[Tensor | None] | None = None
    """Set while it waits for a step; ``None`` in it for parameters that it has not used."""
    clipping: Clipping = NO_CLIPPING
    norm: float = -1.0
    """Of its last step."""

    @property
    def waits(self) -> bool:
        """Whether it waits for a step."""
        return self.gradients is not None


class Server:
    """Holds parameters, and steps them with the gradients of workers.

    Each worker is served by a thread of its own; the one whose gradient was missing makes the step.

    Args:
        parameters: The weights.
        optimizers: Their optimizers.
        workers: Number of workers.
        max_staleness: As of the strategy.
        timeout: Seconds in which another rank's worker must compute a gradient.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizers: Sequence[Optimizer],
        workers: int,
        max_staleness: int | None,
        timeout: float,
    ) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._bound, self._timeout = max_staleness, timeout
        self._workers = [Worker() for _ in range(workers)]
        self._version = 0
        self._staleness: dict[int, list[int]] = {}
        self._signal = self._last = 0
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def staleness(self) -> dict[str, float]:
        """Mean over the gradients applied since the last call, and each worker's maximum."""
        with self._changed:
            found, self._staleness = self._staleness, {}
        steps = [each for own in found.values() for each in own]
        largest = {f"staleness_max/rank-{rank}": float(max(found[rank])) for rank in sorted(found)}
        return {"staleness": sum(steps) / len(steps), **largest} if steps else {}

    # --- requests of a worker, each in its own thread ---------------------------------------------

    def pull(self, rank: int, signal: int = 0) -> Tensor:
        """Start a step of a worker; return the packed weights on which it computes a gradient.

        Args:
            rank: The worker.
            signal: Signal on which it asks all workers to stop, or 0.
        """
        with self._changed:
            if signal and not self._signal:
                # One more: a worker may have been answered, and not have started its next step.
                self._last = 1 + max(each.started for each in self._workers)
                self._signal = signal
            worker = self._workers[rank]
            worker.version, worker.started = self._version, worker.started + 1
            return pack(self._parameters)

    def step(self, rank: int, gradients: Sequence[Tensor | None], clipping: Clipping) -> Stepped:
        """Return once a worker's gradients, ``None`` for unused parameters, have been applied."""
        with self._changed:
            worker = self._workers[rank]
            worker.gradients, worker.clipping = gradients, clipping
            while worker.waits:
                if group := self._next_group():
                    self._step_with(group)
                    self._changed.notify_all()
                else:
                    self._changed.wait()
            return Stepped(worker.norm, self._signal, self._last)

    # --- steps ------------------------------------------------------------------------------------

    def _next_group(self) -> list[int]:
        """The workers whose gradients make the next step; none if a worker must be waited for.

        A step with one gradient is made as soon as no other worker's weights become older by it
        than the bound. Those that would are waited for, and then averaged into one step. With a
        bound of 0 these are all workers.
        """
        ready = [rank for rank, each in enumerate(self._workers) if each.waits]
        needed = [rank for rank, each in enumerate(self._workers) if self._is_at_bound(each)]
        if ready and needed:
            return needed if set(needed) <= set(ready) else []
        return ready[:1]

    def _is_at_bound(self, worker: Worker) -> bool:
        if not self._bound:
            return self._bound == 0
        return worker.version is not None and self._version - worker.version >= self._bound

    def _step_with(self, group: Sequence[int]) -> None:
        """Step with the average of some workers' gradients."""
        workers = [self._workers[rank] for rank in group]
        for index, parameter in enumerate(self._parameters):
            parameter.grad = _average([(each.gradients or [])[index] for each in workers])
        has_gradients = any(each.grad is not None for each in self._parameters)
        norm = self._clip(workers[0].clipping) if has_gradients else -1.0
        for optimizer in self._optimizers if has_gradients else ():
            optimizer.step()
        for rank, worker in zip(group, workers, strict=True):
            started = self._version if worker.version is None else worker.version
            self._staleness.setdefault(rank, []).append(self._version - started)
            worker.version, worker.gradients, worker.norm = None, None, norm
        self._version += has_gradients

    def _clip(self, clipping: Clipping) -> float:
        computes = clipping.norm >= 0
        norm = clip_gradients(self._parameters, clipping.norm, "norm") if computes else None
        if clipping.value < torch.inf:
            clip_gradients(self._parameters, clipping.value, "value")
        return -1.0 if norm is None else float(norm)

    # --- workers on other ranks -------------------------------------------------------------------

    def serve(self, group: Any) -> None:
        """Serve the workers of all other ranks, whose :class:`RemoteServer` has this group."""
        for rank in range(1, len(self._workers)):
            thread = threading.Thread(target=self._serve, args=(rank, group), daemon=True)
            self._threads.append(thread)
            thread.start()

    def leave(self, rank: int) -> None:
        """Wait until all workers have left."""
        for thread in self._threads:
            thread.join(self._timeout)

    def _serve(self, rank: int, group: Any) -> None:
        try:
            request = torch.empty(_NUMBERS + len(self._parameters), dtype=torch.float64)
            while True:
                self._receive(request, rank, group)
                kind, first, second, *used = request.tolist()
                if kind == _LEAVE:
                    return
                if kind == _PULL:
                    dist.send(self.pull(rank, int(first)), rank, group)
                    continue
                pairs = zip(self._parameters, used, strict=True)
                sent = [each for each, is_used in pairs if is_used]
                content = _room(sent)
                self._receive(content, rank, group)
                found = iter(unpack(content, sent))
                gradients = [next(found) if is_used else None for is_used in used]
                stepped = self.step(rank, gradients, Clipping(first, second))
                dist.send(torch.tensor(stepped, dtype=torch.float64), rank, group)
        except Exception as error:
            reports.end_failed(error, [LostWorker.__name__])

    def _receive(self, content: Tensor, rank: int, group: Any) -> None:
        # Between steps a worker may wait for others, or validate.
        computes = self._workers[rank].version is not None
        within = datetime.timedelta(seconds=self._timeout)
        try:
            group.recv([content], rank, 0).wait(within if computes else MOST_TO_MEET)
        except RuntimeError:
            # gloo closes all connections when one has timed out, so it may be another worker.
            reason = f"a worker has ended, or sent no gradient within {self._timeout:g} s"
            raise LostWorker(reason) from None


class RemoteServer:
    """The server of rank 0, for workers on other ranks; its methods are those of :class:`Server`.

    Args:
        parameters: The worker's.
        group: As of the server.
    """

    def __init__(self, parameters: Sequence[Tensor], group: Any) -> None:
        self._parameters, self._group = parameters, group

    def _send(self, kind: int, *numbers: float, used: Sequence[bool] = ()) -> None:
        request = torch.zeros(_NUMBERS + len(self._parameters), dtype=torch.float64)
        sent = torch.tensor([kind, *numbers, *used], dtype=torch.float64)
        request[: len(sent)] = sent
        dist.send(request, 0, self._group)

    def pull(self, rank: int, signal: int = 0) -> Tensor:
        """Start a step; return the packed weights."""
        self._send(_PULL, signal)
        content = _room(self._parameters)
        dist.recv(content, 0, self._group)
        return content

    def step(self, rank: int, gradients: Sequence[Tensor | None], clipping: Clipping) -> Stepped:
        """Return once the gradients have been applied."""
        self._send(_STEP, *clipping, used=[each is not None for each in gradients])
        dist.send(pack([each for each in gradients if each is not None]), 0, self._group)
        answer = torch.empty(3, dtype=torch.float64)
        dist.recv(answer, 0, self._group)
        norm, signal, last = answer.tolist()
        return Stepped(norm, int(signal), int(last))

    def leave(self, rank: int) -> None:
        """Tell the server that this worker ends as intended."""
        self._send(_LEAVE)


def _average(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Of one parameter, in the order of ranks; a worker that has not used it counts as 0."""
    found = [each for each in gradients if each is not None]
    if not found or len(gradients) == 1:
        return found[0] if found else None
    total = found[0].clone()
    for each in found[1:]:
        total += each
    return total.div_(len(gradients))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after another."""
    parts = [each.detach().reshape(-1).view(torch.uint8) for each in tensors]
    return torch.cat([_room(()), *parts])


def unpack(content: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the bytes of :func:`pack`, with the shapes and data types of others."""
    parts = content.split([each.nbytes for each in like]) if like else ()
    # Copies, which are aligned.
    return [
        part.clone().view(each.dtype).view(each.shape)
        for part, each in zip(parts, like, strict=True)
    ]


def _room(tensors: Sequence[Tensor]) -> Tensor:
    """Uninitialized memory for what :func:`pack` returns."""
    return torch.empty(sum(each.nbytes for each in tensors), dtype=torch.uint8)
