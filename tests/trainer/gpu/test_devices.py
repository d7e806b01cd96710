"""Real GPUs are found and read, and processes are forked before CUDA is initialized only."""

import pytest
import torch
from my_project_trainer.launch import devices, idle_gpus
from tests.gpu import device
from tests.project import PACKAGE, run, succeed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ASKS_THEN_FORKS = f"""
import os
from {PACKAGE}_trainer.launch.devices import choose_accelerator
choose_accelerator("gpu")
import torch
assert torch.cuda.device_count() > 0
child = os.fork()
if child == 0:
    torch.ones(1, device="cuda")
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
FORKS_TOO_LATE = f"""
import torch
from tests.gpu.subject import Sequences
from {PACKAGE}_trainer import Trainer
torch.ones(1, device="cuda")
Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", max_steps=1).fit(Sequences())
"""


@pytest.mark.parametrize("name", ["gpu", "cuda", "auto"])
def test_a_gpu_is_used(name):
    device.only_a_gpu_shows("that it is found")
    assert devices.choose_accelerator(name) == "cuda"


def test_a_process_that_asked_for_gpus_can_still_fork():
    device.only_a_gpu_shows("whether its driver allows a fork")
    succeed(["-c", ASKS_THEN_FORKS], fresh=True)


def test_nothing_is_forked_once_cuda_is_initialized():
    device.only_a_gpu_shows("whether CUDA is initialized")
    done = run(["-c", FORKS_TOO_LATE], fresh=True)
    assert "UserError: processes cannot be forked: CUDA is initialized" in done.stderr
    assert "use strategy='ddp_spawn'" in done.stderr


def test_the_driver_and_torch_see_the_same_gpus():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    device.only_a_gpu_shows("what its driver says")
    gpus = idle_gpus.read_gpus()
    assert [gpu.index for gpu in gpus] == list(range(torch.cuda.device_count()))
    for gpu in gpus:
        properties = torch.cuda.get_device_properties(gpu.index)
        assert gpu.name == properties.name
        assert 0 <= gpu.free_bytes <= properties.total_memory * 1.1  # NVML's total is larger
        assert gpu.processes >= 0
