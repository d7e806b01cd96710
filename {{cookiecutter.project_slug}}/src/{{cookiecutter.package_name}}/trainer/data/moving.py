"""Batches of any nesting, moved to a device and into a number format."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The batch on a device: tensors in dicts, lists, (named) tuples of any depth; others as is.

    Anything with a ``to`` method that takes a device moves too, and so do the fields of a
    dataclass without one.

    Args:
        batch: of any nesting.
        device: where to.
        dtype: of floating-point tensors, in packed sequences too; ``None``: as they are. Whole and
            complex numbers stay, and so does what is in other things with a ``to`` method.
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
    """A tensor on a device; one of floating-point numbers is then cast there, not before."""
    # Nothing waits for a copy to a device; what arrives on the host is read at once.
    moved = tensor.to(device, non_blocking=device.type != "cpu")
    return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved


def mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A batch in which ``change`` is made of all in its dicts, lists, tuples and dataclasses."""
    if isinstance(batch, torch.Tensor | nn.utils.rnn.PackedSequence):
        return change(batch)
    if isinstance(batch, defaultdict):
        items = ((key, mapped(value, change)) for key, value in batch.items())
        return defaultdict(batch.default_factory, items)
    if isinstance(batch, Mapping):
        return type(batch)((key, mapped(value, change)) for key, value in batch.items())  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, change) for value in batch)
    has_own = hasattr(batch, "to") and callable(batch.to)
    if dataclasses.is_dataclass(batch) and not (has_own or isinstance(batch, type)):
        names = (each.name for each in dataclasses.fields(batch) if hasattr(batch, each.name))
        return with_fields(batch, {name: mapped(getattr(batch, name), change) for name in names})
    return change(batch)


def with_fields(batch: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass in which some fields have other values."""
    changed = copy.copy(batch)
    for name, value in values.items():
        # It may be frozen, and __init__ may not take what the fields hold.
        object.__setattr__(changed, name, value)
    return changed
