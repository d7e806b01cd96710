"""Hashes of values and tensors, computed on the tensors' device without a copy of all of them.

The bits are words of at most 32 bits, each times a fixed odd 64-bit number of its position, summed
modulo 2^64: multilinear hashing (Lemire and Kaser 2014, https://arxiv.org/abs/1202.4961). The sums
are exact, in whatever order a device adds. (``torch.hash_tensor`` does not tell apart tensors in
another order.) The sums, data types, shapes and other values are hashed by BLAKE2.
"""

import functools
from collections import defaultdict
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint import dtensors
from ..data import moving

# Words that are multiplied at once, for which 8 MiB are needed.
_WORDS = 2**20
_TYPES = {1: torch.uint8, 2: torch.int16}


class Hash:
    """A hash of values in their order. Tensors are read at once, but not waited for."""

    def __init__(self) -> None:
        self._texts = blake2b(digest_size=8)
        self._sums: dict[torch.device, list[Tensor]] = defaultdict(list)

    @torch.no_grad()
    def add(self, values: Any) -> None:
        """Add values of any nesting; of tensors the bits that this process holds."""
        for each in moving.leaves(values):
            if isinstance(each, Tensor):
                self._add_tensor(each)
            elif isinstance(each, np.ndarray | np.generic) and each.dtype != object:
                self._add_text(str(each.dtype), each.shape, each.tobytes())
            elif isinstance(each, tuple):  # a packed sequence
                self.add(tuple(each))
            elif callable(to_dict := getattr(each, "to_dict", None)):  # a graph
                self.add(to_dict())
            elif each is None or isinstance(each, str | bytes | int | float | complex):
                self._add_text(each)
            else:  # its representation may have an address
                self._add_text(type(each).__name__)

    def hexadecimal(self) -> str:
        """16 digits; the host waits for the devices."""
        whole = self._texts.copy()
        for sums in self._sums.values():
            whole.update(repr(torch.stack(sums).tolist()).encode())
        return whole.hexdigest()

    def _add_text(self, *values: object) -> None:
        self._texts.update(f"{values!r}\n".encode())

    def _add_tensor(self, given: Tensor) -> None:
        if given.layout == torch.sparse_coo:
            whole = given.coalesce()
            self.add((whole.indices(), whole.values()))
            return
        local = dtensors.local(given).detach().resolve_conj().resolve_neg()
        self._add_text(str(local.dtype), tuple(local.shape))
        if local.is_meta:
            return
        words = local.flatten()
        for piece in words.view(_TYPES.get(words.element_size(), torch.int32)).split(_WORDS):
            self._sums[piece.device].append((piece * _numbers(piece.device)[: len(piece)]).sum())


@functools.cache
def _numbers(device: torch.device) -> Tensor:
    """Random odd numbers, the same with every version of NumPy; of a generator of their own."""
    return torch.from_numpy(np.random.PCG64(0).random_raw(_WORDS).view(np.int64) | 1).to(device)
