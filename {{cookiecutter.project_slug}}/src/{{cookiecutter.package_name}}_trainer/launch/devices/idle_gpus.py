"""``auto_select_gpus``: select idle GPUs on a shared machine."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...errors import ConfigurationError

ComputeMode = Literal["default", "exclusive", "prohibited"]


@dataclass(frozen=True)
class GPU:
    """A GPU, with its index in torch and the number of compute processes running on it."""

    index: int
    name: str
    compute_mode: ComputeMode
    processes: int
    free_bytes: int


def choose(gpus: Sequence[GPU], count: int) -> list[int]:
    """Select GPUs for training: idle ones first, then by free memory; return indices, best first.

    GPUs in exclusive mode that already run a process, and GPUs in prohibited mode, are skipped.

    Args:
        gpus: All available GPUs.
        count: Number of GPUs to select, at least 1.

    Raises:
        ConfigurationError: Too few GPUs can be used; the message gives the reason for each other.
    """
    usable, obstacles = [], ""
    for gpu in gpus:
        if gpu.compute_mode == "prohibited":
            obstacles += f"; GPU {gpu.index} ({gpu.name}) is in prohibited mode"
        elif gpu.compute_mode == "exclusive" and gpu.processes > 0:
            obstacles += f"; GPU {gpu.index} ({gpu.name}) is in exclusive mode and occupied"
        else:
            usable.append(gpu)
    if len(usable) < count:
        raise ConfigurationError(
            f"auto_select_gpus: {count} wanted, {len(usable)} of {len(gpus)} can be used"
            f"{obstacles}; ask for fewer{' or wait' if obstacles else ''}"
        )
    usable.sort(key=lambda gpu: (gpu.processes > 0, -gpu.free_bytes, gpu.index))
    return [gpu.index for gpu in usable[:count]]


def read_gpus() -> list[GPU]:
    """Read the GPUs visible to torch through NVML, the driver's library.

    CUDA is not initialized. torch maps its indices to NVML's. In a container, the driver may hide
    the processes of other containers; their memory still counts as used.

    Raises:
        ConfigurationError: NVML's package is missing, NVML fails, or its GPUs cannot be mapped to
            torch's.

    Source: https://docs.nvidia.com/deploy/nvml-api/
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise ConfigurationError(
            "auto_select_gpus needs a package that is not installed: pip install nvidia-ml-py"
        ) from None
    try:
        gpus = [_read(nvml, index) for index in range(torch.cuda.device_count())]
    except (nvml.NVMLError, RuntimeError) as error:  # also for MIG instances
        raise ConfigurationError(
            f"auto_select_gpus: the GPUs cannot be read ({error}); select GPUs with devices=[…]"
        ) from None
    names = sorted({gpu.name for gpu in gpus})
    is_by_uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-")
    is_by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if len(names) > 1 and not is_by_uuid and not is_by_bus:
        raise ConfigurationError(
            f"auto_select_gpus: of different GPUs ({', '.join(names)}) CUDA counts the fastest "
            "first, and which one that is is unknown; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return gpus


def _read(nvml: Any, index: int) -> GPU:
    handle = torch.cuda._get_pynvml_handler(index)
    modes: dict[int, ComputeMode] = {
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    }
    return GPU(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        compute_mode=modes.get(nvml.nvmlDeviceGetComputeMode(handle), "default"),
        processes=len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
        free_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).free,
    )
