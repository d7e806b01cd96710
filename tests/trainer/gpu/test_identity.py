"""The driver and torch mean the same GPU by a number, whole or a part of one (MIG)."""

import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch import idle_gpus
from tests.gpu import device
from tests.gpu.subject import Sequences
from tests.gpu.training import train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture
def nvml():
    module = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    device.only_a_gpu_shows("what its driver says")
    module.nvmlInit()
    yield module
    module.nvmlShutdown()


def handles(nvml) -> list:
    """Of all GPUs, as the driver counts them."""
    return [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]


def is_mig(nvml) -> bool:
    """Whether a GPU here is cut into parts."""
    for handle in handles(nvml):
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                return True
        except nvml.NVMLError:  # a GPU that cannot be
            continue
    return False


def test_the_driver_s_uuid_is_torch_s(nvml, record_property):
    if is_mig(nvml):
        with pytest.raises(ConfigurationError, match="MIG"):
            idle_gpus.read_gpus()
        record_property("found", "MIG, which auto_select_gpus refuses")
        return
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles(nvml)]
    indices = range(torch.cuda.device_count())
    seen = [nvml.nvmlDeviceGetUUID(torch.cuda._get_pynvml_handler(index)) for index in indices]
    properties = map(torch.cuda.get_device_properties, indices)
    assert seen == [f"GPU-{gpu.uuid}" for gpu in properties]
    record_property("found", f"{len(seen)} of {len(uuids)} GPUs are visible")


def test_a_run_that_chooses_its_gpu_trains_there(nvml, tmp_path):
    if is_mig(nvml):
        pytest.skip("MIG: auto_select_gpus refuses to choose among parts of GPUs")
    gpus = idle_gpus.read_gpus()
    assert len(gpus) == torch.cuda.device_count()
    assert idle_gpus.choose_idle(gpus, 1)[0] in range(len(gpus))
    train(tmp_path, "run", Sequences(), auto_select_gpus=True)
