"""Copy batches to a GPU: pin memory, and copy one batch ahead on a side stream.

The next batch is read and copied while a step computes. Not used on CPUs.

Source: https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html,
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from . import moving
from .feed import Feed, MicroBatch


class CopyStream(Protocol):
    """A stream on which batches are copied in parallel with computation."""

    def copying(self) -> AbstractContextManager[Any]:
        """Enqueue copies made in this context on this stream; the host does not wait."""
        ...

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Make later computation wait for all copies so far; the host does not wait.

        Args:
            tensors: Copies whose memory must not be reused before the computation has ended.
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
    """A side stream of a GPU; ``None`` for the CPU."""
    return _SideStream(device) if device.type != "cpu" else None


def read(
    feed: Feed,
    epoch: int,
    start: int,
    devices: Sequence[torch.device],
    dtype: torch.dtype | None,
) -> Iterator[MicroBatch]:
    """Yield the batches of an epoch; those for a GPU are copied one batch ahead.

    Those that several GPUs share are copied to pinned memory.

    Objects with their own ``to`` method and subclasses of Tensor are left for the step's own
    stream: it is unknown when their memory can be reused.

    Args:
        feed: Yields the batches.
        epoch: The epoch to read.
        start: Number of the first batch.
        devices: Target devices.
        dtype: Cast floating-point tensors to it on the device; ``None``: no cast.
    """
    batches, device = feed.epoch(epoch, start), devices[0]
    stream = copy_stream(device)
    if stream is None:
        return batches
    if len(devices) > 1:
        return (batch._replace(data=_each_plain(batch.data, pinned)) for batch in batches)
    # Without a plan, the ranks exchange the length of each batch. A rank that fails to read must
    # not go on to a step in which its peers, which wait for it, do not take part.
    return _ahead(batches, stream, device, dtype, holds_errors=feed.has_plan)


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
        # Before the next copy starts, because this batch need not wait for it.
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
    """The next batch with its tensors on the device; an error, to be raised in its turn; or
    ``None`` at the end."""
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
        tensors.append(moving.to(pinned(tensor), device, dtype))
        return tensors[-1]

    with stream.copying():
        data = _each_plain(batch.data, copied)
    return batch._replace(data=data), tensors


def pinned(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned memory; a non-dense tensor would be copied by the host."""
    if tensor.is_pinned() or tensor.numel() == 0:
        return tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; the host does not wait for the copy."""
    return moving.to(tensor if device.type == "cpu" else pinned(tensor), device, None)


def _each_plain(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to each plain CPU tensor in a batch."""

    def changed(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            data, _, *indices = value
            return PackedSequence(changed(data), value.batch_sizes, *map(changed, indices))
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
