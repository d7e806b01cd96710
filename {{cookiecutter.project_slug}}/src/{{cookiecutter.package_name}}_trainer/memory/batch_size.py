"""Find the largest batch size that fits into memory, the same on all ranks.

A rank that runs out of memory must not leave its peers waiting. So a trial contains no collectives
(no gradient averaging, no synchronized BatchNorm, no gather), and ranks agree on its result only.
"""

import gc
from collections.abc import Callable

import torch

from ..errors import UserError
from ..launch import collectives

# Messages of CPU, CUDA, cuBLAS and cuDNN errors that are plain RuntimeErrors.
_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "std::bad_alloc",
)


def largest_that_fits(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """Find the largest batch size that fits on every rank: double it until it fails, then bisect.

    Every rank tries the same sizes; ones that are smaller than the first only if it does not fit.
    ``fits`` tries a size on this rank alone; the least ``start`` and ``limit`` of ranks are used.
    """
    start, limit = _minimum(start, limit)
    fitting, too_large = 0, limit + 1
    size = min(start, limit)
    while fitting + 1 < too_large:
        if _minimum(fits(size))[0]:
            fitting = size
        else:
            too_large = size
        has_failed = too_large <= limit
        size = (fitting + too_large) // 2 if has_failed else min(2 * fitting, limit)
    if fitting == 0:
        raise UserError(
            "find_batch_size: a batch of one sample does not fit into the memory of every device; "
            "use precision='bf16-mixed', or make the model or its samples smaller"
        )
    return fitting


def fits_in_memory(trial: Callable[[], object]) -> bool:
    """Whether a trial, which has no collectives, fits into memory, which is freed afterward.

    If the operating system overcommits memory, as Linux does, running out of it on the CPU kills
    the process instead of raising an error: there, only ``limit`` prevents this.
    """
    fits = True
    try:
        trial()
    except Exception as error:
        fits = False
        if not is_out_of_memory(error):
            raise
    # After the except block: the traceback keeps the trial's tensors alive.
    gc.collect()
    torch.cuda.empty_cache()
    return fits


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host ran out of memory."""
    is_named = any(message in str(error) for message in _MEMORY_MESSAGES)
    is_own_class = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_own_class or (isinstance(error, RuntimeError) and is_named)


def _minimum(*values: int) -> list[int]:
    """The minimum of each value over all ranks."""
    least: list[int] = collectives.all_reduce(torch.tensor(values), "min").tolist()
    return least
