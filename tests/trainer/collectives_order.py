"""Whether ranks start their operations in orders with which NCCL ends, found from records.

A GPU runs the operations of a rank one after another, and each waits for the peers of its group. So
two ranks must start what they share in the same order, over all groups that they share. That is
tried by playing the records back: an operation ends when all of its ranks have come to it. What is
played to its end has no two ranks with different orders, and no circle of three either.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True)
class Operation:
    """What a rank has started.

    Args:
        kind: name of the operation.
        group: ranks of the process group.
        name: of the process group.
        sizes: what is equal on all of its ranks.
        peer: rank to which it sends, or from which it receives.
        batch: equal for sends and receives that start at once.
        is_host: whether the group stays on the host, also on GPUs.
        thread: name of the thread; empty: the main one.
        where: line of the trainer.
    """

    kind: str
    group: tuple[int, ...]
    name: str = ""
    sizes: tuple[object, ...] = ()
    peer: int | None = None
    batch: int | None = None
    is_host: bool = False
    thread: str = ""
    where: str = ""

    def __str__(self) -> str:
        other = "" if self.peer is None else f" {self.peer}"
        group = f"{self.name} {list(self.group)}"
        return f"{self.kind}{other} over group {group} of {list(self.sizes)} ({self.where})"


Ranks = Mapping[int, Sequence[Operation]]


def read(folder: Path) -> dict[int, list[Operation]]:
    """The operations of each rank, from the files ``rank-N.jsonl``."""
    return {
        int(path.stem.split("-")[1]): [
            Operation(**{key: _hashable(value) for key, value in json.loads(line).items()})
            for line in path.read_text().splitlines()
        ]
        for path in folder.glob("rank-*.jsonl")
    }


def _hashable(value: object) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


class _Stream:
    """The operations of a thread: those that have started and wait, and those after them."""

    def __init__(self, rank: int, operations: Sequence[Operation]) -> None:
        self.rank = rank
        numbered = enumerate(operations)
        grouped = groupby(numbered, lambda each: (each[1].batch, each[1].batch is None and each[0]))
        self._rest = [[operation for _, operation in batch] for _, batch in grouped][::-1]
        self.waiting: list[Operation] = []
        self.advance()

    def advance(self) -> None:
        """Start the next operation, or batch, if no other waits."""
        if not self.waiting and self._rest:
            self.waiting = self._rest.pop()


def stuck(ranks: Ranks) -> list[str]:
    """Play the records back; what each rank waits in when none can continue, if that happens."""
    streams = [
        _Stream(rank, [operation for operation in operations if operation.thread == thread])
        for rank, operations in ranks.items()
        for thread in dict.fromkeys(operation.thread for operation in operations)
    ]
    while any(_ends(streams, stream) for stream in streams):
        pass
    return [f"rank {stream.rank} waits in {op}" for stream in streams for op in stream.waiting]


def _ends(streams: Sequence[_Stream], stream: _Stream) -> bool:
    """End an operation of a stream, on all of its ranks, if all of them have come to it."""
    for operation in stream.waiting:
        places = [_at(streams, *place) for place in _parts(stream.rank, operation)]
        if all(places):
            for other, started in filter(None, places):
                other.waiting.remove(started)
                other.advance()
            return True
    return False


def _parts(rank: int, operation: Operation) -> Iterator[tuple[int, Operation]]:
    """The ranks of an operation, and what each of them starts for it."""
    ours = operation
    if ours.peer is None:
        yield from ((member, ours) for member in ours.group)
    else:
        other = {"send": "recv_", "recv_": "send"}[ours.kind]
        yield rank, ours
        yield ours.peer, Operation(other, ours.group, ours.name, ours.sizes, rank)


def _at(
    streams: Sequence[_Stream], rank: int, operation: Operation
) -> tuple[_Stream, Operation] | None:
    """Where a rank waits in an operation."""
    for stream in streams:
        for waiting in stream.waiting if stream.rank == rank else ():
            if _same(waiting, operation):
                return stream, waiting
    return None


def _same(one: Operation, other: Operation) -> bool:
    return (one.kind, one.group, one.name, one.sizes, one.peer) == (
        *(other.kind, other.group, other.name, other.sizes, other.peer),
    )
