"""What a run sets in torch's GPU backends, for as long as it lasts: matrix precision, cuDNN.

Source: https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html,
https://docs.pytorch.org/docs/stable/backends.html
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...errors import Problems, nearest

PRECISIONS = ("highest", "high", "medium")


def check(given: Mapping[str, Any], problems: Problems) -> None:
    """Check ``matmul_precision`` and ``cudnn_benchmark`` of a trainer's arguments.

    Args:
        given: by name.
        problems: takes a line for each mistake.
    """
    precision = given["matmul_precision"]
    if precision not in (None, *PRECISIONS):
        problems.add(f"matmul_precision={precision!r} is unknown{nearest(precision, PRECISIONS)}")
    if given["cudnn_benchmark"] and given["deterministic"]:
        problems.add(
            "cudnn_benchmark=True with deterministic=True: which algorithm is fastest differs from "
            "run to run, and so do the last bits; leave cudnn_benchmark out"
        )


@contextlib.contextmanager
def applied(device_type: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Set torch's backends as a trainer's arguments say, and put them back afterward.

    Args:
        device_type: on CPUs nothing is set.
        given: the trainer's arguments.
    """
    if device_type != "cuda":
        yield
        return
    benchmark, precisions = torch.backends.cudnn.benchmark, _Precisions()
    asked = given["cudnn_benchmark"]
    torch.backends.cudnn.benchmark = not given["deterministic"] if asked is None else asked
    wanted = given["matmul_precision"]
    if wanted is not None or not precisions.are_chosen:
        _set_matmul_precision(wanted or "high")
    try:
        yield
    finally:
        precisions.restore()
        torch.backends.cudnn.benchmark = benchmark


def remarks(device_type: str, precision: str) -> list[str]:
    """One line if float32 matrix products are computed in less than float32 now.

    Args:
        device_type: of the run.
        precision: of the run; where autocast or parameters are in half, there are few such.
    """
    if device_type != "cuda" or precision != "32-true":
        return []
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return []
    return ["float32 matrix products in TF32 (matmul_precision 'highest': in float32)"]


class _Precisions:
    """Of float32 matrix products, as the program has set them.

    torch has two interfaces to them. The older one sets both of the newer one's, and can be read
    only where these do not contradict it; torch.compile reads both. So the older one is what sets
    them here, and both are put back.
    """

    def __init__(self) -> None:
        self._older = "highest"  # which alone contradicts the newer one
        with contextlib.suppress(RuntimeError):
            self._older = torch.get_float32_matmul_precision()
        self._newer = [each.fp32_precision for each in _matmul_backends()]

    @property
    def are_chosen(self) -> bool:
        """Whether the program has said what it wants on GPUs."""
        return str(self._newer[0]) != "none"

    def restore(self) -> None:
        """Put them back."""
        _set_matmul_precision(self._older)
        for backend, precision in zip(_matmul_backends(), self._newer, strict=True):
            backend.fp32_precision = precision


def _matmul_backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _set_matmul_precision(precision: str) -> None:
    with warnings.catch_warnings():
        # Some versions of torch recommend the newer interface, which its compiler does not take.
        warnings.filterwarnings("ignore", "Please use the new API settings")
        torch.set_float32_matmul_precision(precision)
