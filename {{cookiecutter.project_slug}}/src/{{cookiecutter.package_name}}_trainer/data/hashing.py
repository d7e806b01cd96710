"""Hashes of values of any nesting; ranks compare those of their first batches.

The bits of a tensor are words of at most 32 bits, each times a fixed odd 64-bit number of its
position, summed modulo 2^64: multilinear hashing (Lemire and Kaser 2014,
https://arxiv.org/abs/1202.4961). The sums of pieces are the words of the next round. They are
exact, in whatever order a device adds, and hashed by BLAKE2 with data types and shapes.
(``torch.hash_tensor`` does not tell apart tensors in another order.) Nothing is rounded: of many
numbers that differ in the last bit, some always lie on two sides of a rounding.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checkpoint import dtensors
from ..errors import UserError
from ..launch import collectives, output, reports
from .moving import leaves

_WORDS = 2**15  # words of a piece: with their numbers and products, 640 KiB
_PIECES = 32  # at once on an accelerator, on which each operation has a price
_TYPES = {1: torch.uint8, 2: torch.int16}
_HOW = "by data_index and data_replicas of the module or the data module"


class Hash:
    """A hash of values in their order. Tensors are read at once, but not waited for."""

    def __init__(self) -> None:
        self._texts = blake2b(digest_size=8)
        self._sums: dict[torch.device, list[Tensor]] = defaultdict(list)

    @torch.no_grad()
    def add(self, values: Any, depth: int = 3) -> None:
        """Add values of any nesting, also in objects; of tensors the bits that are here."""
        for leaf in leaves(values):
            if isinstance(leaf, Tensor):
                self._add_tensor(dtensors.local(leaf).detach())
            elif isinstance(leaf, np.ndarray) and leaf.dtype == object:
                self.add(leaf.tolist(), depth)
            elif isinstance(leaf, np.ndarray | np.generic):
                self._add_text(str(leaf.dtype), leaf.shape, leaf.tobytes())
            elif isinstance(leaf, tuple):  # a packed sequence
                self.add(tuple(leaf), depth)
            elif leaf is None or isinstance(leaf, str | bytes | int | float | complex):
                self._add_text(leaf)
            else:  # its representation may have an address
                self._add_text(type(leaf).__name__)
                if depth and not isinstance(leaf, type):
                    self.add(list(getattr(leaf, "__dict__", {}).items()), depth - 1)

    def hexadecimal(self) -> str:
        """16 digits; the host waits for the devices."""
        combined = self._texts.copy()
        for sums in self._sums.values():
            combined.update(repr(torch.stack(sums).tolist()).encode())
        return combined.hexdigest()

    def _add_text(self, *values: object) -> None:
        self._texts.update(f"{values!r}\n".encode(errors="backslashreplace"))

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.is_nested:
            self.add(tensor.unbind())
            return
        self._add_text(str(tensor.dtype), tuple(tensor.shape))
        if tensor.is_meta:
            return
        if tensor.layout != torch.strided:
            sparse = tensor.to_sparse_coo().coalesce()
            self.add((sparse.indices(), sparse.values()))
            return
        plain = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
        words = plain.flatten()
        words = words.view(_TYPES.get(words.element_size(), torch.int32))
        numbers = _numbers(words.device)
        while len(words) > _WORDS:
            words = _sums(words, numbers).view(torch.int32)
        self._sums[words.device].append((words * numbers[: len(words)]).sum())


def digest(values: Any) -> str:
    """The hash of values, such as a batch; the host waits for their devices."""
    hasher = Hash()
    hasher.add(values)
    return hasher.hexadecimal()


def check_first_batch(
    batches: Iterator[Any], replica: int, *, replicas: int, tells: bool
) -> Iterator[Any]:
    """Compare the first batch with that of the other ranks, and iterate over all.

    ``replica`` is that of this rank. A UserError, on every rank, says that ranks of a replica have
    read different ones. ``tells``: print a note if replicas read the same.
    """
    is_shared = collectives.world_size() > replicas
    # Without a process group no ranks share a replica.
    if collectives.is_active() and (is_shared or (tells and replicas > 1)):
        first = next(batches, None)
        # Also without a batch: the other ranks wait.
        fingerprint = torch.tensor([replica, int(digest(first), 16) >> 1])
        _compare([row.tolist() for row in collectives.all_gather_equal(fingerprint)], tells)
        return batches if first is None else chain([first], batches)
    return batches


def _compare(fingerprints: Iterable[list[int]], tells: bool) -> None:
    in_replica: dict[int, dict[int, int]] = defaultdict(dict)  # first rank by fingerprint
    readers: dict[int, dict[int, int]] = defaultdict(dict)  # first rank by replica
    for rank, (replica, value) in enumerate(fingerprints):
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
        output.print_lines(
            f"note: {reports.names(most.values())} have read the same first batch: the loader is "
            f"read as it is, and each sample then counts {len(most)} times; split the data {_HOW}",
            error=True,
        )


def _sums(words: Tensor, numbers: Tensor) -> Tensor:
    at_once = _WORDS if words.device.type == "cpu" else _WORDS * _PIECES
    padded = (pad(chunk, (0, -len(chunk) % _WORDS)) for chunk in words.split(at_once))
    return torch.cat([(chunk.view(-1, _WORDS) * numbers).sum(1) for chunk in padded])


@functools.cache
def _numbers(device: torch.device) -> Tensor:
    """Random odd numbers, the same with every version of NumPy; of a generator of their own."""
    return torch.from_numpy(np.random.PCG64(0).random_raw(_WORDS).view(np.int64) | 1).to(device)
