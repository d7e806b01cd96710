"""The server of ``parameter_server``: holds the weights, and steps with gradients as they arrive.

Source of the bounded staleness: Ho et al. 2013 (https://papers.nips.cc/paper/4894).
"""

import math
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...launch import failures
from ..clipping import clip_gradients
from ..optimizers import Optimization

_LEAVES = -1  # what a worker sends instead of a signal when it ends as intended
MOST_TO_MEET = timedelta(days=1)  # workers meet when the slowest has made its steps of the epoch

Gradients = Sequence[Tensor | None]  # of each parameter; ``None`` if it was not used
Clipping = tuple[float, float]  # bounds of a gradient's norm, and of its values; 0 does not clip


class Server:
    """Holds parameters, and steps them with the gradients of workers, each in its own thread.

    ``timeout``: seconds in which another rank's worker must compute a gradient.
    """

    def __init__(
        self, optimization: Optimization, workers: int, max_staleness: int | None, timeout: float
    ) -> None:
        self.parameters, self._optimizers = optimization.parameters, optimization.optimizers
        self.changed_weights: Sequence[Tensor] = ()
        """The weights of the worker of this process, which its user's code may have changed."""
        self._bound = math.inf if max_staleness is None else max_staleness
        self._timeout = timeout
        self._version = 0  # number of steps made
        self._computing: dict[int, int] = {}  # by worker that computes: the version of its weights
        self._waiting: dict[int, Gradients] = {}  # by worker that waits for a step
        self._started = [0] * workers  # number of steps that each worker has started
        self._signal = self._last = 0  # on which all workers stop, and after which of their steps
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def pull(self, rank: int, signal: int = 0) -> Tensor:
        """Start a step of a worker; return the packed weights on which it computes a gradient.

        ``signal``: the one on which the worker asks all workers to stop, or 0.
        """
        with self._changed:
            if signal and not self._signal:
                # One more: a worker may have been answered, and not have started its next step.
                self._signal, self._last = signal, 1 + max(self._started)
            self._computing[rank] = self._version
            self._started[rank] += 1
            return pack(self.parameters)

    def step(self, rank: int, gradients: Gradients, clipping: Clipping) -> int:
        """Apply a worker's gradients; return the signal on which it stops after this step, or 0."""
        with self._changed:
            self._waiting[rank] = gradients
            while rank in self._waiting:
                if group := self._next_group(rank):
                    self._step_with(group, clipping)
                    self._changed.notify_all()
                else:
                    self._changed.wait()
            return self._signal if self._started[rank] >= self._last else 0

    def _next_group(self, rank: int) -> list[int]:
        """The workers whose gradients make the next step; none if a worker must be waited for.

        Those whose weights would become older than the bound are waited for, and averaged into one
        step; with a bound of 0 these are all. Without any, a gradient is a step.
        """
        computing = self._computing.items()
        needed = {worker for worker, version in computing if self._version - version >= self._bound}
        if self._bound == 0:
            needed = set(range(len(self._started)))
        if not needed:
            return [rank]
        return sorted(needed) if needed <= self._waiting.keys() else []

    def _step_with(self, ranks: Sequence[int], clipping: Clipping) -> None:
        for parameter, changed in zip(self.parameters, self.changed_weights, strict=False):
            parameter.data.copy_(changed.detach())
        gradients = zip(*(self._waiting.pop(rank) for rank in ranks), strict=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = _average(gradient)
        for rank in ranks:
            del self._computing[rank]
        if all(parameter.grad is None for parameter in self.parameters):
            return
        for bound, algorithm in zip(clipping, ("norm", "value"), strict=True):
            if bound:
                clip_gradients(self.parameters, bound, algorithm)
        for optimizer in self._optimizers:
            optimizer.step()
        self._version += 1

    def serve(self, group: Any) -> None:
        """Serve the workers of all other ranks, whose :class:`RemoteServer` has this group."""
        for rank in range(1, len(self._started)):
            thread = threading.Thread(target=self._serve, args=(rank, group), daemon=True)
            self._threads.append(thread)
            thread.start()

    def leave(self) -> None:
        for thread in self._threads:
            thread.join(self._timeout)

    def _serve(self, rank: int, group: Any) -> None:
        signal, content = torch.tensor([0]), pack(self.parameters)
        numbers = torch.zeros(2 + len(self.parameters), dtype=torch.float64)
        try:
            while self._received(signal, rank, group) != _LEAVES:
                dist.send(self.pull(rank, int(signal)), rank, group)
                norm, value, *used = self._received(numbers, rank, group).tolist()
                tensors = unpack(self._received(content, rank, group), self.parameters)
                pairs = zip(tensors, used, strict=True)
                gradients = [tensor if is_used else None for tensor, is_used in pairs]
                dist.send(torch.tensor([self.step(rank, gradients, (norm, value))]), rank, group)
        except Exception as error:
            failures.exit_after_failure(error)

    def _received(self, content: Tensor, rank: int, group: Any) -> Tensor:
        # Between steps a worker may wait for others, or validate.
        within = timedelta(seconds=self._timeout) if rank in self._computing else MOST_TO_MEET
        group.recv([content], rank, 0).wait(within)
        return content


class RemoteServer:
    """The server of rank 0, for a worker on another rank, with the methods of :class:`Server`."""

    def __init__(self, parameters: Sequence[Tensor], group: Any) -> None:
        self.parameters, self._group = parameters, group

    def pull(self, rank: int, signal: int = 0) -> Tensor:
        dist.send(torch.tensor([signal]), 0, self._group)
        content = pack(self.parameters)
        dist.recv(content, 0, self._group)
        return content

    def step(self, rank: int, gradients: Gradients, clipping: Clipping) -> int:
        used = [gradient is not None for gradient in gradients]
        dist.send(torch.tensor([*clipping, *used], dtype=torch.float64), 0, self._group)
        pairs = zip(gradients, self.parameters, strict=True)
        # A parameter that was not used is sent in place of its gradient, and not read.
        content = pack([tensor if gradient is None else gradient for gradient, tensor in pairs])
        dist.send(content, 0, self._group)
        answer = torch.tensor([0])
        dist.recv(answer, 0, self._group)
        return int(answer)

    def leave(self) -> None:
        """Tell the server that this worker ends as intended."""
        dist.send(torch.tensor([_LEAVES]), 0, self._group)


def _average(gradients: Gradients) -> Tensor | None:
    """Of one parameter, in the order of ranks; a worker that has not used it counts as 0."""
    used = [gradient for gradient in gradients if gradient is not None]
    return sum(used[1:], used[0]) / len(gradients) if used else None


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after another."""
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])


def unpack(content: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the bytes of :func:`pack`, with the shapes and data types of others."""
    pairs = zip(content.split([tensor.nbytes for tensor in like]), like, strict=True)
    # Copies, which are aligned.
    return [piece.clone().view(tensor.dtype).view(tensor.shape) for piece, tensor in pairs]
