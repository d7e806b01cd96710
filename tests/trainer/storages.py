"""Count the memory that tensors take: each storage that operations make, until it is freed."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that are made in this context, as those of plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(each is not Tensor for each in types):
            return NotImplemented  # a subclass: what it does with its plain tensors is counted
        kwargs = kwargs or {}
        known = {_pointer(each) for each in tree_iter((args, kwargs)) if _has_memory(each)}
        out = func(*args, **kwargs)
        for each in tree_iter(out):
            if _has_memory(each) and _pointer(each) not in known | self._known.keys():
                self._add(each.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        pointer, size = storage.data_ptr(), storage.nbytes()
        self._known[pointer] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, pointer)

    def _remove(self, pointer: int) -> None:
        self.live -= self._known.pop(pointer)


def _has_memory(value: Any) -> bool:
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta:
        return False
    return value.untyped_storage().nbytes() > 0


def _pointer(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
