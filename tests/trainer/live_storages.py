"""Counts the storages of tensors that are alive, of real tensors and of fake ones."""

from collections.abc import Iterable
from typing import Any

import torch
from my_project_trainer.checkpoint import dtensors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Notes the storages of at least ``smallest`` bytes that operators make inside it."""

    def __init__(self, smallest: int = 1) -> None:
        super().__init__()
        self._smallest = smallest
        self._noted: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self._before: set[int] = set()
        self.most = 0
        """The most bytes of storages that were made since :meth:`begin`."""
        self._is_counting = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it calls operators on its own tensors, which come here
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and self._note(leaf):  # made before, or elsewhere
                self._before.add(leaf.untyped_storage()._cdata)
        outputs = func(*args, **(kwargs or {}))
        is_new = [self._note(value) for value in tree_leaves(outputs) if isinstance(value, Tensor)]
        if self._is_counting and any(is_new):
            self.most = max(self.most, self.added())
        return outputs

    def _note(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or type(tensor) is DTensor:
            return False
        storage = tensor.untyped_storage()
        if storage._cdata in self._noted or storage.nbytes() < self._smallest:
            return False
        # As long as there is a weak reference, no other storage gets the same address.
        self._noted[storage._cdata] = StorageWeakRef(storage), tensor.dtype
        return True

    def sizes(self, dtype: torch.dtype | None = None) -> dict[int, int]:
        """Bytes of each storage that is alive, by its address; of one data type, or of all."""
        live = {}
        for address, (weak, stored_type) in list(self._noted.items()):
            size = _bytes(weak)
            if size is None:
                del self._noted[address]
            elif size >= self._smallest and dtype in (None, stored_type):
                live[address] = size
        return live

    def begin(self) -> None:
        """Count from here what is added."""
        self._before, self.most, self._is_counting = set(self.sizes()), 0, True

    def since_begin(self) -> dict[int, int]:
        """Bytes of each storage that was made since :meth:`begin`, and is alive."""
        return {key: size for key, size in self.sizes().items() if key not in self._before}

    def added(self) -> int:
        """Bytes that were made since :meth:`begin`, and are alive."""
        return sum(self.since_begin().values())

    def end(self) -> int:
        """Stop counting; the most bytes that were added."""
        self._is_counting = False
        return self.most


def _bytes(weak: StorageWeakRef) -> int | None:
    if weak.expired():
        return None
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return None if storage is None else storage.nbytes()


class Pair(nn.Module):
    """Two weights of the same size, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    """Bytes of each storage of tensors, or of their local shards, by its address."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None and tensor.dim():
            storage = dtensors.local(tensor.detach()).untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sizes
