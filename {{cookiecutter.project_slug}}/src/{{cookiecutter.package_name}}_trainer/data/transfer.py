"""Copy batches to a GPU: pin memory, and copy one batch ahead on a side stream.

The next batch is read and copied while a step computes. Not used on CPUs.

Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html,
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import moving
from .feed import Feed
from .sampling import MicroBatch


class CopyStream:
    """A stream of a GPU on which batches are copied in parallel with computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu: Any = torch.get_device_module(device)  # torch.cuda
        self._stream = self._gpu.Stream(device)

    def copying(self) -> AbstractContextManager[Any]:
        """Enqueue copies made in this context on this stream."""
        return cast(AbstractContextManager[Any], self._gpu.stream(self._stream))

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Make later computation wait for all copies so far, and these copies' memory for it."""
        computing = self._gpu.current_stream(self._device)
        computing.wait_stream(self._stream)
        for each in tensors:
            each.record_stream(computing)


def copy_stream(device: torch.device) -> CopyStream | None:
    """A side stream of a GPU; ``None`` for the CPU."""
    return CopyStream(device) if device.type != "cpu" else None


def read(
    feed: Feed, epoch: int, start: int, devices: Sequence[torch.device], dtype: torch.dtype | None
) -> Iterator[MicroBatch]:
    """Yield the batches of an epoch: for a GPU copied one ahead, for several in pinned memory.

    Objects with their own ``to`` and subclasses of Tensor are left for the step's own stream: it is
    unknown when their memory can be reused. ``dtype``: as in :func:`moving.move`.
    """
    batches, device = feed.epoch(epoch, start), devices[0]
    stream = copy_stream(device)
    if stream is None:
        return batches
    if len(devices) > 1:
        return (each._replace(data=_each_plain(each.data, pinned)) for each in batches)

    def copied(batch: MicroBatch) -> tuple[MicroBatch, list[Tensor]]:
        tensors: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            tensors.append(moving.to(pinned(tensor), device, dtype))
            return tensors[-1]

        with stream.copying():
            data = _each_plain(batch.data, copy)
        return batch._replace(data=data), tensors

    return _ahead(map(copied, batches), stream)


def _ahead(
    copies: Iterator[tuple[MicroBatch, list[Tensor]]], stream: CopyStream
) -> Iterator[MicroBatch]:
    """Yield batches whose copies are handed over, one behind the newest copy."""
    error: Exception | None = None
    following = next(copies, None)
    while following is not None:
        batch, tensors = following
        # Before the next copy starts, because this batch need not wait for it.
        stream.hand_over(tensors)
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


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; the host does not wait for the copy."""
    return moving.to(tensor if device.type == "cpu" else pinned(tensor), device, None)


def _each_plain(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:

    def changed(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return moving.repacked(value, changed)
        return change(value) if _is_plain(value) else value

    return moving.mapped(batch, changed)


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
    )
