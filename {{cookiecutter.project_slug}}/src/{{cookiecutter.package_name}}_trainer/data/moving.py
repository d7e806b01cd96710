"""Move batches of any nesting to a device, and cast them."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move the tensors of a batch to a device, and objects that have their own ``to``.

    ``dtype``: floating-point tensors are cast to it.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to(value, device, dtype)
        if isinstance(value, PackedSequence):
            return repacked(value, moved)
        return value.to(device) if _has_to(value) else value

    return mapped(batch, moved)


def to(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Move a tensor to a device; a floating-point tensor is cast there, not before."""
    # A copy to a device need not be waited for; a copy to the host is read at once.
    moved = tensor.to(device, non_blocking=device.type != "cpu")
    return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved


def repacked(sequence: PackedSequence, change: Callable[[Any], Any]) -> PackedSequence:
    """A packed sequence with changed values and indices; its batch sizes stay on the CPU."""
    data, sizes, *indices = sequence
    return PackedSequence(change(data), sizes, *map(change, indices))


def mapped(
    batch: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply ``change`` to all values in the dicts, lists, tuples and dataclasses of a batch.

    ``is_leaf``: whether one of these is changed as a whole.
    """

    def each(value: Any) -> Any:
        return mapped(value, change, is_leaf)

    if isinstance(batch, Tensor | PackedSequence) or (is_leaf is not None and is_leaf(batch)):
        return change(batch)
    if isinstance(batch, defaultdict):
        items = {key: each(value) for key, value in batch.items()}
        return defaultdict(batch.default_factory, items)
    if isinstance(batch, Mapping):
        return type(batch)((key, each(value)) for key, value in batch.items())  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(each, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(each, batch))
    is_type = isinstance(batch, type)
    if dataclasses.is_dataclass(batch) and not (is_type or _has_to(batch)):
        changed = copy.copy(batch)
        for name in (each.name for each in dataclasses.fields(batch) if hasattr(batch, each.name)):
            # It may be frozen, and __init__ may not accept the values of the fields.
            object.__setattr__(changed, name, each(getattr(batch, name)))
        return changed
    return change(batch)


def leaves(batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The values to which :func:`mapped` applies a function."""
    found: list[Any] = []
    mapped(batch, found.append, is_leaf)
    return found


def _has_to(value: Any) -> bool:
    return callable(getattr(value, "to", None))


def is_empty(batch: Any) -> bool:
    """Whether a batch contains tensors, and all of them are empty."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if isinstance(first, Tensor) and first.ndim and first.shape[0]:
        return False  # nearly all batches, in a third of the time
    lengths = [len(each) for each in leaves(batch) if isinstance(each, Tensor) and each.ndim]
    return bool(lengths) and not any(lengths)
