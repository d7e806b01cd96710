"""FairScale's fully sharded data parallel on CPUs, which have no CUDA streams.

FairScale uses ``torch.cuda`` streams to overlap computation and communication. Without CUDA,
operations run in the order of their calls, which is already correct. Here, FairScale's module sees
a ``torch.cuda`` whose streams do nothing.
"""

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def _nothing(*_: Any) -> None:
    """Do nothing."""


# A stream on which all work is already done.
_STREAM = SimpleNamespace(wait_stream=_nothing, synchronize=_nothing)
# The part of `torch.cuda` that FairScale uses.
_STREAMS = SimpleNamespace(
    # FairScale then creates the streams that it later uses unconditionally.
    is_available=lambda: True,
    Stream=lambda: _STREAM,
    current_stream=lambda: _STREAM,
    stream=lambda _: nullcontext(),
    synchronize=_nothing,
)


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """Let FairScale's module compute on CPUs in this context."""
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale

    record_stream = Tensor.record_stream

    def record_on_devices(tensor: Tensor, stream: Any) -> None:
        if tensor.device.type != "cpu":
            record_stream(tensor, stream)

    fairscale.torch = SimpleNamespace(**{**vars(torch), "cuda": _STREAMS})
    Tensor.record_stream = record_on_devices  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        fairscale.torch = torch
        Tensor.record_stream = record_stream  # type: ignore[method-assign]
