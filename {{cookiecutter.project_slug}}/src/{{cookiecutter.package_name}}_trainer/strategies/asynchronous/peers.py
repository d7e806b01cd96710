"""A worker's connections to all parameter servers; the first one carries collectives."""

import contextlib
import math
import socket
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import UserError
from .server import NORM, SIGNAL, STEP, STEPPED
from .steps import present_bytes
from .wire import Connection, Kind, Packing, WrongSecretError, as_bytes, unpack_by_rank


class ServerLostError(RuntimeError):
    """A server has ended or failed; its own rank says why."""


class Peers:
    """The servers and, through the first of them, the other workers (a ``collectives.Channel``).

    Args:
        rank: This worker's rank.
        world_size: Number of workers at the start.
        ports: Port of each server on this node.
        secret: The run's secret.
        timeout: Seconds after which a silent server is lost.
    """

    def __init__(
        self, rank: int, world_size: int, ports: Sequence[int], secret: bytes, timeout: float
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.own_failure: Callable[[], BaseException | None] = lambda: None
        """Why the server of this rank has failed, if it has."""
        self.living = list(range(world_size))
        """Ranks that took part in the last exchange."""
        self.stop = (0, 0)
        """The signal on which all workers stop, or 0, and after which of their steps."""
        self._connections: list[Connection] = []
        for index, port in enumerate(ports):
            connection = Connection(socket.create_connection(("127.0.0.1", port), timeout))
            self._connections.append(connection)
            try:
                connection.join(secret, rank, timeout)
            except (WrongSecretError, OSError) as error:
                raise UserError(
                    f"the parameter server of rank {index} did not accept this worker: another "
                    "program listens there, or the secrets differ"
                ) from error
        self._packings = [Packing([]) for _ in ports]
        self._shares: list[list[Tensor]] = [[] for _ in ports]

    def share(self, shares: Sequence[Sequence[Tensor]]) -> None:
        """Set this worker's parameters of each server."""
        self._shares = [list(each) for each in shares]
        self._packings = [Packing(each) for each in shares]

    def pull(self, *, to_train: bool) -> None:
        """Copy the servers' weights into this worker's parameters.

        Args:
            to_train: Whether the next gradient is computed on them, which the servers count.
        """
        kind = Kind.PULL if to_train else Kind.PEEK
        self._send_all(kind)
        for index, packing in enumerate(self._packings):
            received = packing.read(self._receive(index, kind))
            with torch.no_grad():
                for parameter, new in zip(self._shares[index], received, strict=True):
                    parameter.copy_(new)

    def send_gradients(self) -> None:
        """Send the gradients of this worker's parameters."""
        for index, packing in enumerate(self._packings):
            buffer = packing.empty()
            gradients = [each.grad for each in self._shares[index]]
            for view, gradient in zip(packing.views(buffer), gradients, strict=True):
                if gradient is not None:
                    view.copy_(gradient)
            self._send(index, Kind.GRADIENTS, present_bytes(gradients), as_bytes(buffer))

    def norm(self) -> float:
        """Norm of the average of all workers' gradients, after each has sent its own."""
        self._send_all(Kind.NORM)
        answers = [self._receive(index, Kind.NORM) for index in range(len(self._shares))]
        return math.sqrt(sum(NORM.unpack(each)[0] for each in answers))

    def step(self, factor: float, largest: float) -> None:
        """Have the servers step; return when this worker's gradients were applied.

        Args:
            factor: Of the gradients.
            largest: The largest absolute value of an element of a gradient.
        """
        self._send_all(Kind.STEP, STEP.pack(factor, largest))
        for index in range(len(self._shares)):
            _, *stop = STEPPED.unpack(self._receive(index, Kind.STEP))
            if index == 0:
                self.stop = (stop[0], stop[1])

    def tell_signal(self, number: int) -> None:
        """Tell the workers of a signal, on which all stop after the same step."""
        self._send(0, Kind.SIGNAL, SIGNAL.pack(number))
        _, *stop = STEPPED.unpack(self._receive(0, Kind.SIGNAL))
        self.stop = (stop[0], stop[1])

    def exchange(self, content: bytes) -> dict[int, bytes]:
        """Give this worker's bytes; receive those of all workers that are not lost, by rank."""
        self._send(0, Kind.EXCHANGE, content)
        found = unpack_by_rank(self._receive(0, Kind.EXCHANGE))
        self.living = sorted(found)
        return found

    def leave(self) -> None:
        """Tell the servers that this worker ends as intended, and close the connections."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the server has ended before
                connection.send(Kind.LEAVE)
            connection.close()

    def _send_all(self, kind: Kind, *parts: bytes) -> None:
        for index in range(len(self._connections)):
            self._send(index, kind, *parts)

    def _send(self, index: int, kind: Kind, *parts: bytes | memoryview) -> None:
        try:
            self._connections[index].send(kind, *parts)
        except OSError as error:
            raise _lost(index, error) from None

    def _receive(self, index: int, expected: Kind) -> bytearray:
        while True:
            try:
                kind, content = self._connections[index].receive()
            except OSError as error:
                raise _lost(index, error) from None
            if kind is expected:
                return content
            if kind is not Kind.WAIT:
                if index == self.rank and (failure := self.own_failure()) is not None:
                    raise failure
                raise ServerLostError(f"the parameter server of rank {index} failed")


def _lost(index: int, error: OSError) -> ServerLostError:
    # Without the OSError as its cause: reports recognize it by its own type.
    reason = "is silent" if isinstance(error, TimeoutError) else "has closed the connection"
    return ServerLostError(f"the parameter server of rank {index} {reason}")
