"""Which GPUs ``auto_select_gpus`` takes, and how they are read."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch import idle_gpus

GIB = 2**30


def gpu(index: int, mode: str = "default", processes: int = 0, free: int = 80) -> Any:
    return idle_gpus.GPU(index, "H200", mode, processes, free * GIB)


@pytest.mark.parametrize(
    ("gpus", "count", "chosen"),
    [
        # All alike: in order.
        ([gpu(0), gpu(1), gpu(2)], 2, [0, 1]),
        # Idle ones first, however little memory they have.
        ([gpu(0, processes=1, free=70), gpu(1, free=10), gpu(2, free=20)], 2, [2, 1]),
        # Then shared ones, those with most free memory first.
        ([gpu(0, processes=1, free=30), gpu(1, processes=4, free=60), gpu(2)], 3, [2, 1, 0]),
        # Exclusive and occupied: passed over. Exclusive and idle: taken like any other.
        ([gpu(0, "exclusive", processes=1), gpu(1, "exclusive"), gpu(2, processes=1)], 2, [1, 2]),
        # Prohibited: passed over, though it is idle.
        ([gpu(0, "prohibited"), gpu(1, processes=1, free=5)], 1, [1]),
        # torch's indices are given back, not places in the list.
        ([gpu(3), gpu(1, processes=1)], 1, [3]),
    ],
)
def test_the_most_idle_are_chosen(gpus: list[Any], count: int, chosen: list[int]) -> None:
    assert idle_gpus.choose_idle(gpus, count) == chosen


def test_too_few_are_refused_with_what_is_wrong_with_each() -> None:
    gpus = [gpu(0, "exclusive", processes=1), gpu(1), gpu(2, "prohibited")]
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.choose_idle(gpus, 2)
    assert raised.value.problems == [
        "auto_select_gpus: 2 wanted, 1 of 3 can be used; GPU 0 (H200) is in exclusive mode and "
        "occupied; GPU 2 (H200) is in prohibited mode; ask for fewer or wait"
    ]


@pytest.mark.parametrize("gpus", [[], [gpu(0)]])
def test_more_than_there_are_are_refused(gpus: list[Any]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.choose_idle(gpus, 2)
    problem = f"auto_select_gpus: 2 wanted, {len(gpus)} of {len(gpus)} can be used; ask for fewer"
    assert raised.value.problems == [problem]


class NVML:
    """What of ``pynvml`` is used, over two GPUs: an occupied exclusive one and a prohibited one."""

    NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.names = ["H200", "H200"]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return (self.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, self.NVML_COMPUTEMODE_PROHIBITED)[handle]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [object()] * (2 - handle)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(free=(handle + 1) * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> NVML:
    made = NVML()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # As with CUDA_VISIBLE_DEVICES=1,0.
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda index: 1 - index)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return made


def test_gpus_are_read_in_torch_s_order(nvml: NVML) -> None:
    assert idle_gpus.read_gpus() == [
        idle_gpus.GPU(0, "H200", "prohibited", 1, 2 * GIB),
        idle_gpus.GPU(1, "H200", "exclusive", 2, 1 * GIB),
    ]


def test_gpus_of_several_models_need_an_order_or_names(nvml, monkeypatch):
    nvml.names = ["H200", "A100"]
    for name, value in (("CUDA_VISIBLE_DEVICES", "1,0"), ("CUDA_DEVICE_ORDER", "FASTEST_FIRST")):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigurationError) as raised:
            idle_gpus.read_gpus()
        assert raised.value.problems == [
            "auto_select_gpus: of different GPUs (A100, H200) CUDA counts the fastest first, and "
            "which one that is is unknown; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        ]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert len(idle_gpus.read_gpus()) == 2
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,GPU-aa")
    assert len(idle_gpus.read_gpus()) == 2


def test_a_driver_that_fails_is_named(nvml: NVML, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> Any:
        raise RuntimeError("cuda driver can't be loaded, is cuda enabled?")

    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", fail)
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.read_gpus()
    assert raised.value.problems == [
        "auto_select_gpus: the GPUs cannot be read (cuda driver can't be loaded, is cuda "
        "enabled?); select GPUs with devices=[…]"
    ]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.read_gpus()
    problem = "auto_select_gpus needs a package that is not installed: pip install nvidia-ml-py"
    assert raised.value.problems == [problem]
