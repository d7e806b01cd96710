"""FairScale's fully sharded data parallel on CPUs, where there are no CUDA streams to order.

It asks ``torch.cuda`` for streams to compute and to communicate on at the same time. Without CUDA
everything happens in the order in which it is called, which is right as it is: here its module
sees a ``torch.cuda`` whose streams do nothing.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class _Stream:
    """A stream on which everything has happened already."""

    def wait_stream(self, stream: "_Stream") -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class _Streams:
    """What FairScale asks of ``torch.cuda``."""

    def __init__(self) -> None:
        self._only = _Stream()

    def is_available(self) -> bool:
        """Yes: then FairScale makes the streams that it uses later without asking."""
        return True

    def Stream(self) -> _Stream:
        """A stream."""
        return self._only

    def current_stream(self) -> _Stream:
        """The stream on which all happens."""
        return self._only

    def stream(self, stream: _Stream) -> AbstractContextManager[None]:
        """Nothing changes in it."""
        return nullcontext()

    def synchronize(self) -> None:
        """There is nothing to wait for."""


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """FairScale's module computes on CPUs inside it."""
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
