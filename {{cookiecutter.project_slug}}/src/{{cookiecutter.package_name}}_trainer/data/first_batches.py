"""Compare the first batches of ranks: in a replica they must be equal, in different ones not."""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..launch import collectives, reports
from .moving import leaves

_VALUES = 1024  # of a tensor
_DEPTH = 3  # of objects in a batch
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
        own = torch.tensor([replica, fingerprint(first)])
        _compare([each.tolist() for each in collectives.all_gather_equal(own)], tells)
        return batches if first is None else chain([first], batches)
    return batches


def fingerprint(batch: Any) -> int:
    """A hash of types, shapes and some values on the CPU, rounded: CPUs may differ in a bit."""
    text = "\0".join(_texts(batch, _DEPTH))
    digest = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _texts(batch: Any, depth: int) -> Iterator[str]:
    for value in leaves(batch):
        if isinstance(value, Tensor | np.ndarray):
            yield f"{value.dtype} {tuple(value.shape)}"
            yield from map(_rounded, _some(value))
        elif isinstance(value, str | bytes | int | float | None):
            yield _rounded(value)
        elif depth:  # a batch object, such as a graph
            yield type(value).__name__
            parts = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
            for part in parts:
                yield from _texts(part, depth - 1)


def _some(value: Any) -> list[Any]:
    """Some values of a tensor or array, from all over it."""
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if value.device.type != "cpu" or not is_plain:
            return []
        value = value.detach()
    flat = value.reshape(-1)
    count = len(flat)
    if count > _VALUES:  # a prime stride: no column of a matrix
        flat = flat[np.arange(_VALUES) * 7919 % count]
    values: list[Any] = flat.tolist()
    return values


def _rounded(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


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
