"""Compare the first batches of ranks: in a replica they must be equal, in different ones not."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from ..errors import UserError
from ..launch import collectives, reports
from .hashing import digest

_HOW = "by data_index and data_replicas of the module or the data module"


def compared(batches: Iterator[Any], replica: int, *, replicas: int, tells: bool) -> Iterator[Any]:
    """Read the first batch, compare it with that of the other ranks, and iterate over all.

    ``replica`` is that of this rank. ``tells``: print a note if replicas read the same.

    Raises:
        UserError: Ranks of a replica have read different batches; on every rank.
    """
    is_shared = collectives.world_size() > replicas
    # Without a process group no ranks share a replica.
    if collectives.is_active() and (is_shared or (tells and replicas > 1)):
        first = next(batches, None)
        # Also without a batch: the other ranks wait.
        own = torch.tensor([replica, int(digest(first), 16) >> 1])
        _compare([each.tolist() for each in collectives.all_gather_equal(own)], tells)
        return batches if first is None else chain([first], batches)
    return batches


def _compare(found: Iterable[list[int]], tells: bool) -> None:
    """Compare the replicas and fingerprints of ranks, in their order."""
    in_replica: dict[int, dict[int, int]] = defaultdict(dict)  # first rank by fingerprint
    readers: dict[int, dict[int, int]] = defaultdict(dict)  # first rank by replica
    for rank, (replica, value) in enumerate(found):
        in_replica[replica].setdefault(value, rank)
        readers[value].setdefault(replica, rank)
    for ranks in in_replica.values():
        if len(ranks) > 1:
            raise UserError(
                f"{reports.names(ranks.values())} are in one replica and have read different "
                f"batches: all ranks of a replica must read the same; split the data {_HOW}, not "
                "by rank"
            )
    most = max(readers.values(), key=len)
    if tells and len(most) > 1 and collectives.rank() == 0:
        print(
            f"note: {reports.names(most.values())} have read the same first batch: the loader is "
            f"read as it is, and each sample then counts {len(most)} times; split the data {_HOW}",
            file=sys.stderr,
            flush=True,
        )
