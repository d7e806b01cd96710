"""FairScale's fully sharded data parallel on CPUs, which have no CUDA streams.

FairScale uses ``torch.cuda`` streams to overlap computation and communication. Without CUDA,
operations run in the order of their calls, which is already correct. Here, FairScale's module sees
a ``torch.cuda`` whose streams do nothing.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _Stream:
    """A stream on which all work is already done."""

    def wait_stream(self, stream: "_Stream") -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class _Streams:
    """The part of ``torch.cuda`` that FairScale uses."""

    def __init__(self) -> None:
        self._only = _Stream()

    def is_available(self) -> bool:
        """Return True: FairScale then creates the streams that it later uses unconditionally."""
        return True

    def Stream(self) -> _Stream:
        """Create a stream."""
        return self._only

    def current_stream(self) -> _Stream:
        """The only stream."""
        return self._only

    def stream(self, stream: _Stream) -> AbstractContextManager[None]:
        """A context that changes nothing."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """Let FairScale's module compute on CPUs in this context."""
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale

    record_stream = Tensor.record_stream

    def record_on_devices(tensor: Tensor, stream: Any) -> None:
        if tensor.device.type != "cpu":
            record_stream(tensor, stream)

    fairscale.torch = SimpleNamespace(**{**vars(torch), "cuda": _Streams()})
    Tensor.record_stream = record_on_devices  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        fairscale.torch = torch
        Tensor.record_stream = record_stream  # type: ignore[method-assign]
