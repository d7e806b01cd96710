"""``auto_select_gpus``: idle GPUs on a shared machine."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigurationError


@dataclass(frozen=True)
class GPU:
    """A GPU: its index in torch, its state, and the number of compute processes running on it."""

    index: int
    name: str
    compute_mode: str
    processes: int
    free_bytes: int

    @property
    def obstacle(self) -> str:
        """Why it cannot be used; empty if it can."""
        if self.compute_mode == "prohibited":
            return f"; GPU {self.index} ({self.name}) is in prohibited mode"
        is_taken = self.compute_mode == "exclusive" and self.processes > 0
        return f"; GPU {self.index} ({self.name}) is in exclusive mode and occupied" * is_taken


def choose_idle(gpus: Sequence[GPU], count: int) -> list[int]:
    """Indices of the best GPUs: idle ones first, then by free memory."""
    usable = [gpu for gpu in gpus if not gpu.obstacle]
    if len(usable) < count:
        obstacles = "".join(gpu.obstacle for gpu in gpus)
        problem = f"{count} wanted, {len(usable)} of {len(gpus)} can be used{obstacles}"
        advice = f"ask for fewer{' or wait' if obstacles else ''}"
        raise ConfigurationError(f"auto_select_gpus: {problem}; {advice}")
    usable.sort(key=lambda gpu: (gpu.processes > 0, -gpu.free_bytes, gpu.index))
    return [gpu.index for gpu in usable[:count]]


def read_gpus() -> list[GPU]:
    """Read the GPUs visible to torch through NVML, without initializing CUDA."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        missing = "a package that is not installed: pip install nvidia-ml-py"
        raise ConfigurationError(f"auto_select_gpus needs {missing}") from None
    modes = {
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    }
    gpus = []
    try:
        for index in range(torch.cuda.device_count()):
            handle = torch.cuda._get_pynvml_handler(index)  # maps torch's index to NVML's
            mode = modes.get(nvml.nvmlDeviceGetComputeMode(handle), "default")
            processes = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            free_bytes = nvml.nvmlDeviceGetMemoryInfo(handle).free
            gpus.append(GPU(index, nvml.nvmlDeviceGetName(handle), mode, processes, free_bytes))
    except (nvml.NVMLError, RuntimeError) as error:  # also for MIG instances
        problem = f"the GPUs cannot be read ({error}); select GPUs with devices=[…]"
        raise ConfigurationError(f"auto_select_gpus: {problem}") from None
    names = sorted({gpu.name for gpu in gpus})
    is_by_uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-")
    if len(names) > 1 and not is_by_uuid and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        order = f"of different GPUs ({', '.join(names)}) CUDA counts the fastest first"
        problem = "which one that is is unknown; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        raise ConfigurationError(f"auto_select_gpus: {order}, and {problem}")
    return gpus
