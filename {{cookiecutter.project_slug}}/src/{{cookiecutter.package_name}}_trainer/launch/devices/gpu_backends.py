"""Settings of torch's GPU backends during a run: float32 matmul precision, cuDNN benchmark.

Source: https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html,
https://docs.pytorch.org/docs/stable/backends.html
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch

from ...options import Options


@contextlib.contextmanager
def applied(device_type: str, options: Options) -> Iterator[None]:
    """Apply the trainer's options to torch's backends, and restore the settings on exit.

    torch has two APIs for the precision of float32 matrix products. The older one sets both
    settings of the newer one, and can be read only if they agree; torch.compile reads both. Here
    the older API sets them, and both are restored.

    Args:
        device_type: On ``"cpu"`` nothing is set.
        options: The trainer's.
    """
    if device_type != "cuda":
        yield
        return
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    newer = [each.fp32_precision for each in backends]
    older = "highest"  # the only value at which both APIs can disagree
    with contextlib.suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    benchmark, wanted = torch.backends.cudnn.benchmark, options.matmul_precision
    torch.backends.cudnn.benchmark = (
        not options.deterministic if options.cudnn_benchmark is None else options.cudnn_benchmark
    )
    if wanted is not None or str(newer[0]) == "none":  # the program has not set it
        _set_matmul_precision(wanted or "high")
    try:
        yield
    finally:
        _set_matmul_precision(older)
        for backend, precision in zip(backends, newer, strict=True):
            backend.fp32_precision = precision
        torch.backends.cudnn.benchmark = benchmark


def notes(device_type: str, precision: str) -> list[str]:
    """Return one line if float32 matrix products now run in lower precision than float32.

    Args:
        device_type: Device type of the run.
        precision: Precision of the run; in half precision there are few float32 products.
    """
    if device_type != "cuda" or precision != "32-true":
        return []
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return []
    return ["float32 matrix products in TF32 (matmul_precision 'highest': in float32)"]


def _set_matmul_precision(precision: str) -> None:
    with warnings.catch_warnings():
        # Some versions of torch recommend the newer API, which torch.compile does not support.
        warnings.filterwarnings("ignore", "Please use the new API settings")
        torch.set_float32_matmul_precision(precision)
