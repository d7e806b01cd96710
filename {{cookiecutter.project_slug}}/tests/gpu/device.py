"""Which device the checks of this folder run on: the one place that decides it.

By default a GPU. With ``GPU_TESTS_ON=cpu`` the same code runs on the CPU: a dry run, which shows
that the checks themselves work where there is no GPU. What only a GPU can show is then skipped
after it has run, with that reason.
"""

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest
import torch

VARIABLE = "GPU_TESTS_ON"
TYPE = os.environ.get(VARIABLE) or "cuda"
if TYPE not in ("cuda", "cpu"):
    raise pytest.UsageError(f"{VARIABLE}={TYPE!r}: give cuda or cpu")
IS_GPU = TYPE == "cuda"
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")
# For deterministic runs, before the first matrix product of this process, which may be another's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# What the trainer calls it.
ACCELERATOR = "gpu" if IS_GPU else "cpu"
DRY_RUN = "dry run on the CPU: it has run, and only a GPU can show"


def missing() -> str | None:
    """Why the checks cannot run here; ``None`` if they can."""
    if not IS_GPU or torch.cuda.is_available():
        return None
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return f"torch {torch.__version__} ({build}) sees no GPU here"


def only_a_gpu_shows(what: str) -> None:
    """End a test here in a dry run; on a GPU, continue with what it asserts."""
    if not IS_GPU:
        pytest.skip(f"{DRY_RUN} {what}")


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def allocated() -> int:
    """Bytes of live tensors on the GPU; 0 on the CPU, which does not count them."""
    return torch.cuda.memory_allocated() if IS_GPU else 0


def peak() -> int:
    """The most bytes of live tensors since :func:`forget_peak`; 0 on the CPU."""
    return torch.cuda.max_memory_allocated() if IS_GPU else 0


def forget_peak() -> None:
    """Let :func:`peak` begin at what is allocated now."""
    if IS_GPU:
        torch.cuda.reset_peak_memory_stats()


def refuse_waiting(on: bool) -> None:
    """Have torch raise, or no longer raise, where this process waits for the GPU."""
    if IS_GPU:
        torch.cuda.set_sync_debug_mode("error" if on else "default")


def keep_busy(seconds: float) -> None:
    """Queue a kernel that takes so long (at 2 GHz); what is queued after it waits for it."""
    if IS_GPU:
        torch.cuda._sleep(int(seconds * 2e9))


@contextlib.contextmanager
def memory_limited_to(size: int) -> Iterator[None]:
    """Let this process allocate so many bytes on the GPU, and no more."""
    if not IS_GPU:
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
