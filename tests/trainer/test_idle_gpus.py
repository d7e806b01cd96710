"""Which GPUs ``auto_select_gpus`` takes, and under which of torch's indices NVML's stand."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.launch.devices import idle_gpus

GIB = 2**30
UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]
NAMES = ["H200"] * 4


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
    assert idle_gpus.choose(gpus, count) == chosen


def test_the_order_in_which_gpus_are_read_does_not_matter() -> None:
    gpus = [gpu(0, processes=1), gpu(1), gpu(2), gpu(3, free=90)]
    assert idle_gpus.choose(gpus, 3) == idle_gpus.choose(gpus[::-1], 3) == [3, 1, 2]


def test_too_few_are_refused_with_what_is_wrong_with_each() -> None:
    gpus = [gpu(0, "exclusive", processes=1), gpu(1), gpu(2, "prohibited")]
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.choose(gpus, 2)
    assert raised.value.problems == [
        "auto_select_gpus: 2 wanted, 1 of 3 can be used; GPU 0 (H200) is in exclusive mode and "
        "occupied; GPU 2 (H200) is in prohibited mode; ask for fewer or wait"
    ]


@pytest.mark.parametrize("gpus", [[], [gpu(0)]])
def test_more_than_there_are_are_refused(gpus: list[Any]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.choose(gpus, 2)
    assert raised.value.problems == [
        f"auto_select_gpus: 2 wanted, {len(gpus)} of {len(gpus)} can be used; ask for fewer"
    ]


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        ("3, 1", [3, 1]),
        ("0,-1,2", [0]),
        ("0,4,2", [0]),
        ("0,x,2", [0]),
        ("1,1", []),
        ("GPU-cc33,GPU-aa11", [2, 0]),
        ("GPU-c,GPU-ab", [2, 1]),
        ("GPU-c,GPU-a,GPU-d", [2]),  # two begin with GPU-a
        ("GPU-c,GPU-x,GPU-d", [2]),
        ("GPU-c,GPU-cc", []),
        ("GPU-c,0", [2]),
    ],
)
def test_cuda_visible_devices_are_read_as_torch_reads_them(
    text: str | None, positions: list[int]
) -> None:
    environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert idle_gpus.visible(environment, NAMES, UUIDS) == positions


def test_gpus_of_several_models_need_an_order_or_names() -> None:
    names = ["A100", "H200", "H200", "H200"]
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert idle_gpus.visible(by_bus, names, UUIDS) == [0, 1, 2, 3]
    assert idle_gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-aa"}, names, UUIDS) == [2, 0]
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}):
        with pytest.raises(ConfigurationError) as raised:
            idle_gpus.visible(environment, names, UUIDS)
        assert raised.value.problems == [
            "auto_select_gpus: of different GPUs (A100, H200) CUDA counts the fastest first, and "
            "which one that is is unknown; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        ]


def test_parts_of_gpus_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"names MIG instances"):
        idle_gpus.visible({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, NAMES, UUIDS)


class NVML:
    """What of ``pynvml`` is used, over two GPUs: an occupied exclusive one and a prohibited one."""

    NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3

    class NVMLError(Exception):
        pass

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.calls: list[str] = []
        self.mig: dict[int, int] = {0: 0}

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if self.fails:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return (self.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, self.NVML_COMPUTEMODE_PROHIBITED)[handle]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [object()] * (2 - handle)

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if handle not in self.mig:
            raise self.NVMLError("Not Supported")
        return (self.mig[handle], 0)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(free=(handle + 1) * GIB)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> NVML:
    made = NVML()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return made


def test_gpus_are_read_in_torch_s_order(nvml: NVML, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert idle_gpus.read_gpus() == [
        idle_gpus.GPU(0, "H200", "prohibited", 1, 2 * GIB),
        idle_gpus.GPU(1, "H200", "exclusive", 2, 1 * GIB),
    ]
    assert nvml.calls == ["init", "shutdown"]


def test_a_gpu_in_mig_mode_is_refused(nvml: NVML, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.mig[1] = 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert len(idle_gpus.read_gpus()) == 1
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.read_gpus()
    assert raised.value.problems == [
        "auto_select_gpus: GPU GPU-ab22 is partitioned (MIG), of which CUDA shows a process only "
        "one; leave auto_select_gpus out, and set the instance in CUDA_VISIBLE_DEVICES"
    ]


def test_a_driver_that_fails_is_named(nvml: NVML) -> None:
    nvml.fails = True
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.read_gpus()
    assert raised.value.problems == [
        "auto_select_gpus: the driver's library fails (Driver Not Loaded); select GPUs with "
        "devices=[…]"
    ]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ConfigurationError) as raised:
        idle_gpus.read_gpus()
    assert raised.value.problems == [
        "auto_select_gpus needs a package that is not installed: pip install nvidia-ml-py"
    ]
