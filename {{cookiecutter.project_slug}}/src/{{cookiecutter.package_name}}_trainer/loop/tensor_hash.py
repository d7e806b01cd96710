"""Hashes of tensors, computed on their device: the host reads one number per 1 MiB or more.

The bits are words of at most 32 bits, each times a fixed odd 64-bit number of its position, summed
modulo 2^64: multilinear hashing (Lemire and Kaser 2014, https://arxiv.org/abs/1202.4961). The sums
are exact, in whatever order a device adds. Data types, shapes and the sums are hashed by BLAKE2.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from ..checkpoint import dtensors

# Words that are multiplied at once: on a CPU, as many as its caches hold.
_WORDS_ON_CPU = 2**17
_WORDS = 2**22
_TYPES = {1: torch.uint8, 2: torch.int16}
# splitmix64: https://prng.di.unimi.it/splitmix64.c
_STEPS = ((30, -4658895280553007687), (27, -7723592293110705685))
_GOLDEN = -7046029254386353131


class TensorHash:
    """A hash of tensors and texts in their order. Tensors are read at once, but not waited for."""

    def __init__(self) -> None:
        self._texts = blake2b(digest_size=8)
        self.sums: list[Tensor] = []

    def add_text(self, *values: object) -> None:
        """Add values by their ``repr``, which must not contain addresses."""
        self._texts.update(f"{values!r}\n".encode())

    @torch.no_grad()
    def add(self, tensors: Iterable[Tensor | None]) -> None:
        """Add the bits of tensors as far as this process holds them, dense or sparse."""
        waiting: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for part in _dense(tensors):
            if part is None or part.is_meta:
                self.add_text(None)
                continue
            order = sorted(range(part.ndim), key=part.stride, reverse=True)
            self.add_text(str(part.dtype), tuple(part.shape), order)
            # Without a copy, also of a tensor in another memory format.
            words = part.permute(order).reshape(-1)
            words = words.view(_TYPES.get(words.element_size(), torch.int32))
            most = _WORDS_ON_CPU if words.device.type == "cpu" else _WORDS
            for piece in words.split(most):
                together = waiting.setdefault((piece.device, piece.dtype), [])
                if together and sum(map(len, together)) + len(piece) > most:
                    self._multiply(together)
                    together.clear()
                together.append(piece)
        for together in waiting.values():
            self._multiply(together)

    def _multiply(self, pieces: Sequence[Tensor]) -> None:
        words = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        if len(words):
            most = _WORDS_ON_CPU if words.device.type == "cpu" else _WORDS
            self.sums.append((words * _multipliers(most, words.device)[: len(words)]).sum())

    def hexadecimal(self, sums: Sequence[int]) -> str:
        """16 digits, given the numbers of :attr:`sums`."""
        whole = self._texts.copy()
        whole.update(repr(list(sums)).encode())
        return whole.hexdigest()


def read(hashes: Mapping[str, TensorHash]) -> dict[str, str]:
    """Read hashes: the host waits once for each device."""
    sums = [each for one in hashes.values() for each in one.sums]
    numbers: dict[int, int] = {}
    for device in dict.fromkeys(each.device for each in sums):
        there = [each for each in sums if each.device == device]
        found = torch.stack(there).tolist()
        numbers |= {id(each): number for each, number in zip(there, found, strict=True)}
    return {
        name: each.hexadecimal([numbers[id(one)] for one in each.sums])
        for name, each in hashes.items()
    }


def _dense(tensors: Iterable[Tensor | None]) -> Iterable[Tensor | None]:
    for each in tensors:
        if each is None:
            yield None
        elif each.layout == torch.sparse_coo:
            whole = each.detach().coalesce()
            yield from (whole.indices(), whole.values())
        else:
            yield dtensors.local(each).detach().resolve_conj().resolve_neg()


@functools.cache
def _multipliers(count: int, device: torch.device) -> Tensor:
    """Fixed odd numbers that look random; no generator is used."""
    found = torch.arange(1, count + 1, dtype=torch.int64) * _GOLDEN
    for shift, factor in _STEPS:
        found = (found ^ _shifted(found, shift)) * factor
    return ((found ^ _shifted(found, 31)) | 1).to(device)


def _shifted(value: Tensor, by: int) -> Tensor:
    """Shifted right as unsigned numbers."""
    return (value >> by) & ((1 << (64 - by)) - 1)
