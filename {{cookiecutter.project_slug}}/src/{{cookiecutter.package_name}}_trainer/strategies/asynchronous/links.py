"""Messages between the workers and the server of ``parameter_server``, over gloo."""

import contextlib
import enum
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NOTHING = torch.empty(0, dtype=torch.uint8)
SERVER, WORKER = 0, 1
"""The ends of a link."""
_HEAD = 5
_FOREVER = timedelta(days=365)


class Kind(enum.IntEnum):
    """Kinds of messages; an answer has the kind of what it answers."""

    PULL = enum.auto()  # send me the weights; 1: I compute my next gradient on them
    STEP = enum.auto()  # step with my gradients; the answer comes after the step
    EXCHANGE = enum.auto()  # my bytes for all workers; the answer has those of all
    SIGNAL = enum.auto()  # I received this signal: tell the others, and when all stop
    LEAVE = enum.auto()  # I end as intended; no answer
    LOST = enum.auto()  # the worker has ended; not sent
    WAIT = enum.auto()  # from the server: no answer yet, but I am alive
    FAILED = enum.auto()  # from the server, which answers nothing anymore


class LinkError(RuntimeError):
    """The other end of a link has ended, has failed, or is silent."""


class Link:
    """A gloo process group of the server and one worker.

    In a group of all ranks, the end of one would fail what waits for another.

    Args:
        store: For all links.
        rank: The worker's.
        end: ``SERVER`` or ``WORKER``.
        timeout: Seconds to wait for the other end. The server waits for messages without limit.
    """

    def __init__(self, store: dist.Store, rank: int, end: int, timeout: float) -> None:
        seconds = timedelta(seconds=timeout)
        self._peer, self._timeout = 1 - end, _FOREVER if end == SERVER else seconds
        try:
            own = dist.PrefixStore(f"worker-{rank}", store)
            self._group: Any = dist.ProcessGroupGloo(own, end, 2, seconds)
        except RuntimeError as error:
            raise LinkError(str(error)) from None
        # torch forgets a message whose Work is freed before it is received.
        self._sent: deque[dist.Work] = deque(maxlen=8)

    def send(self, kind: Kind, numbers: Sequence[float] = (), content: Tensor = NOTHING) -> None:
        """Send at most three numbers, and bytes, without waiting until they are received."""
        head = torch.zeros(_HEAD, dtype=torch.float64)
        head[: 2 + len(numbers)] = torch.tensor([content.numel(), kind, *numbers])
        try:
            for part in (head, content) if content.numel() else (head,):
                self._sent.append(self._group.send([part], self._peer, 0))
        except RuntimeError as error:
            raise LinkError(str(error)) from None

    def flush(self) -> None:
        """Wait until the last message is received."""
        self._sent[-1].wait(self._timeout)

    def receive(self) -> tuple[Kind, list[float], Tensor]:
        """Receive a message."""
        size, kind, *numbers = self._receive(torch.empty(_HEAD, dtype=torch.float64)).tolist()
        content = torch.empty(int(size), dtype=torch.uint8)
        return Kind(int(kind)), numbers, self._receive(content) if size else content

    def _receive(self, part: Tensor) -> Tensor:
        try:
            self._group.recv([part], self._peer, 0).wait(self._timeout)
        except RuntimeError as error:
            raise LinkError(str(error)) from None
        return part


class Peers:
    """The server and, through it, the other workers (a ``collectives.Channel``).

    Args:
        rank: This worker's rank.
        world_size: Number of workers at the start.
        link: To the server.
    """

    def __init__(self, rank: int, world_size: int, link: Link) -> None:
        self.rank, self.world_size, self._link = rank, world_size, link
        self.server_failure: Callable[[], BaseException | None] = lambda: None
        """Why the server has failed, on its rank."""
        self.living = list(range(world_size))
        """Ranks that took part in the last exchange."""
        self.stop = (0, 0)
        """The signal on which all workers stop, or 0, and after which of their steps."""
        self.ends_last = False
        self._steps = 0

    def _ask(
        self, kind: Kind, numbers: Sequence[float] = (), content: Tensor = NOTHING
    ) -> tuple[list[float], Tensor]:
        self._link.send(kind, numbers, content)
        while True:
            answered, found, answer = self._link.receive()
            if answered is Kind.FAILED:
                failure = self.server_failure()
                raise failure or LinkError("the parameter server of rank 0 failed")
            if answered is not Kind.WAIT:
                return found, answer

    @torch.no_grad()
    def pull(self, parameters: Sequence[Tensor], *, to_train: bool) -> None:
        """Overwrite parameters with the server's.

        Args:
            parameters: This worker's.
            to_train: Whether the next gradient is computed on them, which the server counts.
        """
        _, content = self._ask(Kind.PULL, [to_train])
        for parameter, new in zip(parameters, unpack(content, parameters), strict=True):
            parameter.copy_(new)

    def step(self, parameters: Sequence[Tensor], clipping: tuple[float, float]) -> float:
        """Have the server step; return once it has applied this worker's gradients.

        Args:
            parameters: This worker's, with their gradients.
            clipping: Maximum norm of the step's gradient, or -1, and maximum value of an element.

        Returns:
            The norm of the step's gradient before clipping, or -1 if it was not computed.
        """
        gradients = [each.grad for each in parameters if each.grad is not None]
        used = torch.tensor([each.grad is not None for each in parameters], dtype=torch.uint8)
        found, _ = self._ask(Kind.STEP, clipping, torch.cat([used, pack(gradients)]))
        self.stop = int(found[0]), int(found[1])
        self._steps += 1
        return found[2]

    def agreed_signal(self, received: int) -> int:
        """Tell the workers of a signal; return the one on which all stop after this step, or 0.

        They stop after the same number of their own steps.
        """
        if received and not self.stop[0]:
            found, _ = self._ask(Kind.SIGNAL, [received])
            self.stop = int(found[0]), int(found[1])
        number, last = self.stop
        return number if number and self._steps >= last else 0

    def exchange(self, content: Tensor) -> dict[int, Tensor]:
        """Give this worker's bytes; receive those of all workers that are not lost, by rank."""
        table, parts = self._ask(Kind.EXCHANGE, (), content)[1].tensor_split([8 * self.world_size])
        sizes = table.view(torch.int64).tolist()
        self.living = [rank for rank, size in enumerate(sizes) if size >= 0]
        found = parts.split([sizes[rank] for rank in self.living])
        return dict(zip(self.living, found, strict=True))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all workers that are not lost, in rank order; first dimensions differ."""
        shape = (-1, *tensor.shape[1:]) if tensor.dim() else ()
        found = [each.clone() for each in self.exchange(pack([tensor.cpu()])).values()]  # aligned
        return [each.view(tensor.dtype).reshape(shape).to(tensor.device) for each in found]

    def leave(self) -> None:
        """Tell the server that this worker ends as intended, unless the server has ended."""
        with contextlib.suppress(RuntimeError):
            self._link.send(Kind.LEAVE)
            self._link.flush()


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after another."""
    return torch.cat([NOTHING, *(each.detach().reshape(-1).view(torch.uint8) for each in tensors)])


def unpack(content: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the bytes of :func:`pack`, with the shapes and data types of others."""
    parts = content.split([each.nbytes for each in like]) if like else ()
    # Copies, which are aligned.
    return [
        part.clone().view(each.dtype).view(each.shape)
        for part, each in zip(parts, like, strict=True)
    ]
