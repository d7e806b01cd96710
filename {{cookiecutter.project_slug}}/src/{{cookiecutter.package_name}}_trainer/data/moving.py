"""Move batches of any nesting to a device, and cast them; to a GPU, copy one batch ahead.

It is read, pinned, and copied on a side stream, while the step before computes.

Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html,
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .sampling import MicroBatch

_Copied = tuple[MicroBatch, list[Tensor]]
_IsLeaf = Callable[[Any], bool]


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move a batch's tensors, floating-point ones as ``dtype``, and objects with a ``to``."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to(value, device, dtype)
        return value.to(device) if _has_to(value) else value

    return mapped(batch, moved)


def to(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Move a tensor to a device; a floating-point tensor is cast there, not before."""
    # A copy to a device need not be waited for; a copy to the host is read at once.
    moved = tensor.to(device, non_blocking=device.type != "cpu")
    return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved


def mapped(batch: Any, change: Callable[[Any], Any], is_leaf: _IsLeaf | None = None) -> Any:
    """Apply ``change`` to all values in the dicts, lists, tuples and dataclasses of a batch.

    ``is_leaf``: whether one of these is changed as a whole.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, PackedSequence):
        data, sizes, *indices = batch  # the sizes stay on the CPU
        return PackedSequence(change(data), sizes, *map(change, indices))
    items = None if is_leaf is not None and is_leaf(batch) else items_of(batch)
    if items is None:
        return change(batch)
    return like(batch, {key: mapped(item, change, is_leaf) for key, item in items})


def mapped_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return mapped(batch, lambda value: change(value) if isinstance(value, Tensor) else value)


def leaves(batch: Any, is_leaf: _IsLeaf | None = None) -> list[Any]:
    """The values to which :func:`mapped` applies a function."""
    if isinstance(batch, Tensor) or (is_leaf is not None and is_leaf(batch)):
        return [batch]
    items = items_of(batch)
    return [batch] if items is None else [leaf for _, x in items for leaf in leaves(x, is_leaf)]


def items_of(batch: Any) -> list[tuple[Any, Any]] | None:
    """Keys, names or indices of what a dict, list, tuple or dataclass has; ``None`` for others."""
    if isinstance(batch, PackedSequence):
        return None
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return list(zip(batch._fields, batch, strict=True))
    if isinstance(batch, list | tuple):
        return list(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not (isinstance(batch, type) or _has_to(batch)):
        names = (field.name for field in dataclasses.fields(batch))
        return [(name, getattr(batch, name)) for name in names if hasattr(batch, name)]
    return None


def like(batch: Any, items: dict[Any, Any]) -> Any:
    """A copy of a container with other items; its class may accept other arguments than these."""
    if (kind := type(batch)) in (list, tuple):
        return kind(items.values())
    if isinstance(batch, tuple):
        try:
            changed = tuple.__new__(type(batch), items.values())
        except TypeError:  # of torch.max, which its own class makes
            return type(batch)(items.values())
        if hasattr(batch, "__dict__"):
            vars(changed).update(vars(batch))
        return changed
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return type(batch)(items)  # type: ignore[call-arg]
    changed = copy.copy(batch)
    for key, value in items.items():
        if isinstance(changed, list | MutableMapping):
            changed[key] = value
        else:  # it may be frozen
            object.__setattr__(changed, key, value)
    return changed


def _has_to(value: Any) -> bool:
    return callable(getattr(value, "to", None))


def is_empty(batch: Any) -> bool:
    """Whether a batch contains tensors, and all of them are empty."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if isinstance(first, Tensor) and first.ndim and first.size(0):
        return False  # nearly all batches, in a third of the time
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return bool(tensors) and not any(leaf.size(0) for leaf in tensors)


class CopyStream:
    """A stream of a GPU on which batches are copied in parallel with computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu: Any = torch.get_device_module(device)  # torch.cuda
        self._stream = self._gpu.Stream(device)

    def copying(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], self._gpu.stream(self._stream))

    def synchronize(self, tensors: Sequence[Tensor]) -> None:
        """Make later computation wait for all copies so far, and these copies' memory for it."""
        computing = self._gpu.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(computing)


def copy_stream(device: torch.device) -> CopyStream | None:
    return CopyStream(device) if device.type != "cpu" else None


def ahead(
    batches: Iterator[MicroBatch], devices: Sequence[torch.device], dtype: torch.dtype | None
) -> Iterator[MicroBatch]:
    """Yield batches: for a GPU copied one ahead, for several in pinned memory.

    Objects with their own ``to`` and subclasses of Tensor are left for the step's own stream: it is
    unknown when their memory can be reused. ``dtype``: as in :func:`move`.
    """
    device = devices[0]
    stream = copy_stream(device)
    if stream is None:
        return batches
    if len(devices) > 1:
        return (batch._replace(data=_map_plain(batch.data, pinned)) for batch in batches)

    def copied(batch: MicroBatch) -> _Copied:
        tensors: list[Tensor] = []

        def moved(tensor: Tensor) -> Tensor:
            tensors.append(to(pinned(tensor), device, dtype))
            return tensors[-1]

        with stream.copying():
            data = _map_plain(batch.data, moved)
        return batch._replace(data=data), tensors

    return _ahead(map(copied, batches), stream)


def _ahead(copies: Iterator[_Copied], stream: CopyStream) -> Iterator[MicroBatch]:
    """Yield batches whose copies are handed over, one behind the newest copy."""
    error: Exception | None = None
    following = next(copies, None)
    while following is not None:
        batch, tensors = following
        stream.synchronize(tensors)  # before the next copy, for which this batch need not wait
        try:
            following = next(copies, None)
        except Exception as raised:  # in its turn: the other ranks take part in this step
            following, error = None, raised
        yield batch
    if error is not None:
        raise error


def pinned(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned memory; a non-dense tensor would be copied by the host."""
    if tensor.is_pinned() or tensor.numel() == 0:
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def to_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; the host does not wait for the copy."""
    return to(tensor if device.type == "cpu" else pinned(tensor), device, None)


def _map_plain(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return mapped(batch, lambda value: change(value) if _is_plain(value) else value)


def _is_plain(value: Any) -> bool:
    is_dense = type(value) is Tensor and value.layout is torch.strided and not value.is_nested
    return is_dense and value.device.type == "cpu" and not value.requires_grad
