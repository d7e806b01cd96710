"""Fits on a CUDA build of torch whose GPUs are a stub's: ``make test-fake-gpu``."""

import json
import os
from pathlib import Path

import pytest
import torch
from tests.project import run, succeed

from . import fits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif("FAKE_GPUS" not in os.environ, reason="needs make test-fake-gpu"),
]
SHARDED = ("fsdp", "hsdp", "mesh", "mesh, units", "fsdp, offload")


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        (1, ("single_device", "ddp", "ddp_zero1", *SHARDED)),
        (2, ("ddp", "ddp_zero1", *SHARDED)),
        (4, ("ddp", *SHARDED)),
    ],
)
def test_each_strategy_fits_with_each_precision(tmp_path, devices, names):
    done = succeed(["-m", "fake_gpu.fits", str(devices), *names], cwd=tmp_path, fresh=True)
    peaks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    asked = [(name, precision) for name in names for precision in fits.PRECISIONS]
    assert [(record["name"], record["precision"]) for record in peaks] == asked
    assert all(record["peak"] > 0 for record in peaks)


COUNTS_THEN_FORKS = """
import torch, my_project_trainer as trainer
torch.cuda.device_count()
from fake_gpu.fits import Model
trainer.Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=1).fit(Model())
"""


@pytest.mark.parametrize("nvml", [0, 1])
def test_a_count_through_cuda_is_seen_before_ranks_are_forked(tmp_path: Path, nvml: int) -> None:
    environment = {"FAKE_GPU_NVML": str(nvml)}
    done = run(["-c", COUNTS_THEN_FORKS], cwd=tmp_path, fresh=True, extra=environment)
    assert (done.returncode == 0) is bool(nvml), done.stderr[-3000:]
    assert ("counted GPUs through CUDA" in done.stderr) is not bool(nvml)


def test_memory_ends_where_the_gpu_s_does() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(10 * torch.cuda.get_device_properties(0).total_memory, device="cuda")
