"""The largest batch that fits into memory: the search, agreed among the ranks.

A rank that runs out of memory must not leave the others waiting. So a trial is each rank's alone
and holds no collective (no gradient averaged, no BatchNorm synchronized, nothing gathered), and
only its outcome is agreed upon.
"""

import gc
from collections.abc import Callable

import torch

from ..errors import UserError
from ..launch import collectives

# What CPU, CUDA, cuBLAS and cuDNN say in a RuntimeError that has no type of its own.
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
    """The largest batch size that fits on every rank: doubled until one does not, then bisected.

    Every rank tries the same sizes, at most ``2 * log2(limit)`` of them.

    Args:
        fits: tries a size on this rank alone, such as by :func:`fits_in_memory`. No larger size
            fits than one that does not.
        start: size to try first, of at least 1. The smallest of any rank holds for all.
        limit: size that is never exceeded, such as the samples there are. The smallest of any rank
            holds for all, for ``start`` too.

    Raises:
        UserError: not even the first size fits.
    """
    start, limit = _least(start, limit)
    fitting, too_large = 0, limit + 1
    size = min(start, limit)
    while fitting + 1 < too_large:
        if _least(fits(size))[0]:
            fitting = size
        elif fitting == 0:
            raise UserError(
                f"find_batch_size: a batch of {size} does not fit into the memory of every "
                "device; begin with a smaller one, compute in precision='bf16-mixed', or make "
                "the model or its samples smaller"
            )
        else:
            too_large = size
        nothing_failed_yet = too_large > limit
        size = min(2 * fitting, limit) if nothing_failed_yet else (fitting + too_large) // 2
    return fitting


def fits_in_memory(trial: Callable[[], object]) -> bool:
    """Whether a trial comes to its end before the memory does; what it took is given back.

    Where the system promises more memory than it has, as Linux does, a CPU's end is not an
    exception but the end of the process: there only ``limit`` keeps a search from it.

    Args:
        trial: forward and backward of a batch, without a collective. What else it raises is raised.
    """
    fits = True
    try:
        trial()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    # Not while the error is handled: its traceback holds the trial's tensors.
    gc.collect()
    torch.cuda.empty_cache()
    return fits


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the device or of the host, is what was missing."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(message in str(error) for message in _MEMORY_MESSAGES)


def _least(*values: int) -> list[int]:
    """Each value's smallest over all ranks."""
    least: list[int] = collectives.all_reduce(torch.tensor(values), "min").tolist()
    return least
