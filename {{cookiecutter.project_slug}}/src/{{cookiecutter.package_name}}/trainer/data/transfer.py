"""Batches on their way from the loader to a GPU: pinned, and copied one ahead on a side stream.

While a step computes, the next batch is read and copied. On CPUs there is none of it.

Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html,
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..launch.devices import devices
from .feed import Feed, MicroBatch


class CopyStream(Protocol):
    """Where batches are copied, beside what is computed."""

    def copying(self) -> AbstractContextManager[Any]:
        """What is copied within goes onto this stream; the host does not wait for it."""
        ...

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Have what is computed from now on wait for all copies so far, and the host for nothing.

        Args:
            tensors: whose memory is not used again before what is computed with them has ended.
        """
        ...


class _SideStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu: Any = torch.get_device_module(device)  # torch.cuda
        self._stream = self._gpu.Stream(device)

    def copying(self) -> AbstractContextManager[Any]:
        within: AbstractContextManager[Any] = self._gpu.stream(self._stream)
        return within

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        computing = self._gpu.current_stream(self._device)
        computing.wait_stream(self._stream)
        for each in tensors:
            each.record_stream(computing)


def copy_stream(device: torch.device) -> CopyStream | None:
    """A side stream of a GPU; ``None`` where batches are used where the loader made them."""
    return _SideStream(device) if device.type != "cpu" else None


def read(
    feed: Feed, epoch: int, start: int, device: torch.device, dtype: torch.dtype | None
) -> Iterator[MicroBatch]:
    """The batches of an epoch, those for a GPU copied to it one ahead.

    What is no plain tensor but moves by a ``to`` of its own, and what a subclass of Tensor is, is
    left for the step's own stream: nobody could say here when its memory is free again.

    Args:
        feed: gives the batches.
        epoch: to read.
        start: number of its first batch.
        device: where to.
        dtype: of floating-point tensors, which are cast on the device; ``None``: as they are.
    """
    batches = feed.epoch(epoch, start)
    stream = copy_stream(device)
    if stream is None:
        return batches
    # Without a plan the ranks speak to one another of each batch: one that fails must not go on to
    # a step in which the others, who wait for its word, do not take part.
    return _ahead(batches, stream, device, dtype, holds_errors=feed.has_plan)


def read_pinned(feed: Feed, epoch: int, start: int, device: torch.device) -> Iterator[MicroBatch]:
    """The batches of an epoch in pinned memory, where pieces of each go to several GPUs."""
    batches = feed.epoch(epoch, start)
    if device.type == "cpu":
        return batches
    return (
        batch._replace(data=_each_plain(batch.data, pinned))  # what is pinned is copied later
        for batch in batches
    )


def _ahead(
    batches: Iterator[MicroBatch],
    stream: CopyStream,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    holds_errors: bool,
) -> Iterator[MicroBatch]:
    following = _next(batches, stream, device, dtype, holds_errors)
    while following is not None:
        if isinstance(following, Exception):
            raise following
        batch, tensors = following
        # Before the next copy begins, which this batch need not wait for.
        stream.hand_over(tensors)
        following = _next(batches, stream, device, dtype, holds_errors)
        yield batch


def _next(
    batches: Iterator[MicroBatch],
    stream: CopyStream,
    device: torch.device,
    dtype: torch.dtype | None,
    holds_errors: bool,
) -> tuple[MicroBatch, list[Tensor]] | Exception | None:
    """The next batch and its tensors on the device; the error in its place, to raise in its turn;
    or ``None`` at the end."""
    try:
        batch = next(batches, None)
    except Exception as error:
        if not holds_errors:
            raise
        return error
    if batch is None:
        return None
    tensors: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        tensors.append(devices.to(pinned(tensor), device, dtype))
        return tensors[-1]

    with stream.copying():
        data = _each_plain(batch.data, copied)
    return batch._replace(data=data), tensors


def pinned(tensor: Tensor) -> Tensor:
    """A tensor in memory from which a GPU copies by itself; dense, for else the host copies."""
    if tensor.is_pinned() or tensor.numel() == 0:
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device; the host does not wait for the copy."""
    return devices.to(tensor if device.type == "cpu" else pinned(tensor), device, None)


def _each_plain(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch in which each plain tensor on the CPU is changed, and nothing else."""

    def changed(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            data, _, *indices = value
            return PackedSequence(changed(data), value.batch_sizes, *map(changed, indices))
        return change(value) if _is_plain(value) else value

    return devices.mapped(batch, changed)


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
    )
