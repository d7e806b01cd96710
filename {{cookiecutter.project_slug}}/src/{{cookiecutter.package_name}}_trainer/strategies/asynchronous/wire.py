"""Connections between workers and parameter servers: authenticated, and nothing is pickled.

A message is a header (its kind, and the length of what follows) and raw bytes. Both ends prove that
they know the run's secret before anything else is read: each answers the other's random number with
an HMAC (RFC 2104), so that the secret itself is never sent.
"""

import contextlib
import enum
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_HEADER = struct.Struct("!BQ")
_RANK = struct.Struct("!I")
_ENTRY = struct.Struct("!IQ")
_NONCE = 32
_MAC = hashlib.sha256().digest_size
# Until a peer is authenticated; afterward a message is as long as the model.
_LONGEST_GREETING = 2 * _NONCE + _MAC
_HANDSHAKE_SECONDS = 20.0
# Cache lines; also right for the alignment of every data type.
_ALIGNMENT = 64


class Kind(enum.IntEnum):
    """Kinds of messages."""

    HELLO = 1
    """Of the handshake."""
    PULL = 2
    """Send me the weights, on which I compute my next gradient."""
    PEEK = 3
    """Send me the weights."""
    GRADIENTS = 4
    """Mine, for the next step; no answer."""
    NORM = 5
    """The squared norm of the average of all workers' gradients."""
    STEP = 6
    """Step with my gradients; the answer comes after the step."""
    EXCHANGE = 7
    """My bytes for all workers; the answer has those of all."""
    SIGNAL = 8
    """I received a signal: tell the others, and after which step all stop."""
    WAIT = 9
    """No answer yet, but I am alive."""
    LEAVE = 10
    """I end as intended; no answer."""
    FAILED = 11
    """The server failed."""


class WrongSecretError(Exception):
    """The peer does not know the secret."""


class Connection:
    """A TCP connection between a worker and a server.

    Args:
        connected: A connected socket, which this object owns.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._longest = _LONGEST_GREETING
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(_HANDSHAKE_SECONDS)

    def send(self, kind: Kind, *parts: bytes | memoryview) -> None:
        """Send a message, made of parts."""
        length = sum(len(part) for part in parts)
        self._socket.sendall(_HEADER.pack(kind, length))
        for part in parts:
            self._socket.sendall(part)

    def receive(self) -> tuple[Kind, bytearray]:
        """Receive a message.

        Raises:
            OSError: The connection is lost, or nothing came in time.
        """
        kind, length = _HEADER.unpack(self._receive_bytes(_HEADER.size))
        if length > self._longest:
            raise ConnectionError(f"a message of {length} bytes is too long")
        try:
            return Kind(kind), self._receive_bytes(length)
        except ValueError:
            raise ConnectionError(f"a message of unknown kind {kind}") from None

    def _receive_bytes(self, length: int) -> bytearray:
        content = bytearray(length)
        view = memoryview(content)
        while view:
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionError("the connection was closed")
            view = view[count:]
        return content

    def accept(self, secret: bytes) -> int:
        """Authenticate a worker as the server; return the worker's rank.

        Raises:
            WrongSecretError: It does not know the secret.
        """
        own = secrets.token_bytes(_NONCE)
        self.send(Kind.HELLO, own)
        _, answer = self.receive()
        nonce, rank, mac = answer[:_NONCE], answer[_NONCE:-_MAC], answer[-_MAC:]
        said = own + bytes(nonce) + bytes(rank)
        if len(rank) != _RANK.size or not _is_right(mac, secret, b"worker", said):
            raise WrongSecretError
        self.send(Kind.HELLO, _mac(secret, b"server", said))
        self._longest = 2**63
        return int(_RANK.unpack(rank)[0])

    def join(self, secret: bytes, rank: int, timeout: float) -> None:
        """Authenticate to the server, and the server to this worker.

        Args:
            secret: The run's secret.
            rank: This worker's rank.
            timeout: Seconds after which a silent server is lost.

        Raises:
            WrongSecretError: The server does not know the secret.
        """
        _, nonce = self.receive()
        own = secrets.token_bytes(_NONCE)
        said = bytes(nonce) + own + _RANK.pack(rank)
        self.send(Kind.HELLO, own, _RANK.pack(rank), _mac(secret, b"worker", said))
        _, answer = self.receive()
        if not _is_right(answer, secret, b"server", said):
            raise WrongSecretError
        self._longest = 2**63
        self.patience(timeout)

    def patience(self, seconds: float | None) -> None:
        """Set how long to wait for a message; ``None``: forever."""
        self._socket.settimeout(seconds)

    def interrupt(self) -> None:
        """End the connection for a thread that reads from it, and for the peer."""
        with contextlib.suppress(OSError):  # the peer has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.interrupt()
        self._socket.close()


def _mac(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, "sha256")


def _is_right(mac: bytearray, secret: bytes, role: bytes, said: bytes) -> bool:
    return hmac.compare_digest(bytes(mac), _mac(secret, role, said))


def pack_by_rank(parts: Mapping[int, bytes]) -> bytes:
    """Join bytes of several ranks."""
    heads = [_ENTRY.pack(rank, len(part)) for rank, part in sorted(parts.items())]
    return b"".join([_RANK.pack(len(parts)), *heads, *(parts[rank] for rank in sorted(parts))])


def unpack_by_rank(content: bytearray) -> dict[int, bytes]:
    """Undo :func:`pack_by_rank`."""
    count = _RANK.unpack_from(content)[0]
    begin = _RANK.size + count * _ENTRY.size
    found: dict[int, bytes] = {}
    for index in range(count):
        rank, length = _ENTRY.unpack_from(content, _RANK.size + index * _ENTRY.size)
        found[rank] = bytes(memoryview(content)[begin : begin + length])
        begin += length
    return found


class Packing:
    """Where tensors of fixed shapes lie in one buffer of bytes.

    Args:
        tensors: Give the shapes and data types.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._forms = [(each.shape, each.dtype) for each in tensors]
        self._places: list[slice] = []
        end = 0
        for each in tensors:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + each.numel() * each.element_size()
            self._places.append(slice(begin, end))
        self.size = end

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer: of ``uint8``, with :attr:`size` elements."""
        return [
            buffer[place].view(dtype).view(shape)
            for place, (shape, dtype) in zip(self._places, self._forms, strict=True)
        ]

    def empty(self) -> Tensor:
        """A new buffer."""
        return torch.zeros(self.size, dtype=torch.uint8)

    def read(self, content: bytearray, offset: int = 0) -> list[Tensor]:
        """The tensors in received bytes, of which they are views.

        Raises:
            ConnectionError: Their number of bytes is wrong.
        """
        if len(content) - offset != self.size:
            raise ConnectionError(f"{len(content) - offset} bytes of tensors, not {self.size}")
        if self.size == 0:
            return self.views(self.empty())
        return self.views(torch.frombuffer(content, dtype=torch.uint8, offset=offset))


def as_bytes(buffer: Tensor) -> memoryview:
    """The bytes of a buffer of ``uint8``, without a copy."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]
