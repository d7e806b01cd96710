"""Move batches of any nesting to a device, and cast them."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move a batch to a device: tensors in nested dicts, lists and (named) tuples.

    Objects with a ``to`` method that takes a device are moved too, and so are the fields of
    dataclasses without one. Other objects are unchanged.

    Args:
        batch: A batch of any nesting.
        device: Target device.
        dtype: Cast floating-point tensors to it, also in packed sequences; ``None``: no cast.
            Integer and complex tensors, and other objects with a ``to`` method, are not cast.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return to(value, device, dtype)
        if isinstance(value, nn.utils.rnn.PackedSequence):
            cast = dtype if value.data.is_floating_point() else None
            return value.to(device, cast, non_blocking=device.type != "cpu")  # type: ignore[arg-type,misc]
        if hasattr(value, "to") and callable(value.to):
            return value.to(device)
        return value

    return mapped(batch, moved)


def to(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    """Move a tensor to a device; a floating-point tensor is cast there, not before."""
    # A copy to a device need not be waited for; a copy to the host is read at once.
    moved = tensor.to(device, non_blocking=device.type != "cpu")
    return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved


def mapped(
    batch: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Apply ``change`` to all values in the dicts, lists, tuples and dataclasses of a batch.

    Args:
        batch: A batch of any nesting.
        change: Its result replaces a value.
        is_leaf: Whether a dict, list, tuple or dataclass is changed as a whole.
    """
    is_tensor = isinstance(batch, torch.Tensor | nn.utils.rnn.PackedSequence)
    if is_tensor or (is_leaf is not None and is_leaf(batch)):
        return change(batch)
    if isinstance(batch, defaultdict):
        items = ((key, mapped(value, change, is_leaf)) for key, value in batch.items())
        return defaultdict(batch.default_factory, items)
    if isinstance(batch, Mapping):
        return type(batch)((key, mapped(value, change, is_leaf)) for key, value in batch.items())  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change, is_leaf) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, change, is_leaf) for value in batch)
    has_own = hasattr(batch, "to") and callable(batch.to)
    if dataclasses.is_dataclass(batch) and not (has_own or isinstance(batch, type)):
        names = (each.name for each in dataclasses.fields(batch) if hasattr(batch, each.name))
        fields = {name: mapped(getattr(batch, name), change, is_leaf) for name in names}
        return with_fields(batch, fields)
    return change(batch)


def with_fields(batch: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values in some fields."""
    changed = copy.copy(batch)
    for name, value in values.items():
        # It may be frozen, and __init__ may not accept the values of the fields.
        object.__setattr__(changed, name, value)
    return changed
