"""The search for the largest batch finds it, on all ranks alike."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from my_project_trainer.errors import UserError
from my_project_trainer.loop import trials

from group_worker import MOST, run_ranks
from torch_versions import quiet_gloo

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 40000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    MemoryError(),
]


@given(st.integers(1, 500), st.integers(0, 5000), st.integers(1, 5000))
def test_the_largest_size_that_fits_is_found(start, most, limit):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    if most == 0:
        with pytest.raises(UserError, match="a batch of one sample does not fit"):
            trials.largest_that_fits(fits, start, limit)
    else:
        assert trials.largest_that_fits(fits, start, limit) == min(most, limit)
    assert tried[0] == min(start, limit)
    assert len(set(tried)) == len(tried) <= 2 * math.log2(limit) + 2
    assert max(tried) <= limit


@quiet_gloo
@pytest.mark.parametrize("processes", [2, 3])
def test_ranks_agree_on_the_smallest_and_try_the_same(tmp_path, processes):
    printed = run_ranks("find_batch_size", processes, tmp_path)
    assert set(printed) == {printed[0]}
    assert printed[0].startswith(f"{min(MOST[:processes])} [4, 8, 16, 32, 24, ")


@quiet_gloo
def test_every_rank_hears_that_one_of_them_cannot_even_start(tmp_path):
    printed = run_ranks("too_large_a_start", 2, tmp_path)
    reason = "a batch of one sample does not fit into the memory"
    assert printed[0].startswith(f"find_batch_size: {reason}")
    assert printed[0] == printed[1]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_out_of_memory_is_told_from_other_errors(error):
    def trial() -> None:
        raise error

    assert trials.is_out_of_memory(error)
    assert not trials.fits_in_memory(trial)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: device-side assert"), KeyError("x")])
def test_other_errors_are_raised(error):
    def trial() -> None:
        raise error

    assert not trials.is_out_of_memory(error)
    with pytest.raises(type(error)):
        trials.fits_in_memory(trial)


@pytest.mark.parametrize("allocate", [torch.empty, np.empty])
def test_a_real_lack_of_memory_is_recognized(allocate):
    # A petabyte: no system promises as much.
    assert not trials.fits_in_memory(lambda: allocate((1 << 48,)))
    assert trials.fits_in_memory(lambda: allocate((8,)))


def test_what_a_trial_held_is_free_again():
    freed = []

    class Held:
        itself: Any

        def __del__(self) -> None:
            freed.append(self)

    def trial() -> None:
        held = Held()
        held.itself = held
        raise MemoryError

    assert not trials.fits_in_memory(trial)
    assert len(freed) == 1
