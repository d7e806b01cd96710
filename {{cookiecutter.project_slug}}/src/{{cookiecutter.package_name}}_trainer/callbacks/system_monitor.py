"""Log how busy the machine and the GPU are."""

import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import lost_worker, one_line
from ..launch import output
from ..module import Run, TrainingModule
from .callback import Callback, check

_GIBIBYTE = 2**30


class SystemMonitor(Callback):
    """Log values of rank 0's machine, and of its GPU.

    They are read and logged at a logged step, at most every ``every_n_seconds``:

    - ``system/cpu_percent``, ``system/memory_percent`` and ``system/disk_free_gib``: of the machine
      (in a container too), and of the disk of the run directory; they need psutil.
    - ``system/gpu_percent``, ``system/gpu_memory_gib``, ``system/gpu_power_watts`` and
      ``system/gpu_temperature`` (in degrees Celsius): of rank 0's GPU, with all of its processes,
      if a GPU is used; they need nvidia-ml-py. A value that cannot be read is named once.
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        is_time, psutil = 0 < every_n_seconds < math.inf, importlib.util.find_spec("psutil")
        check(
            "SystemMonitor",
            (is_time, f"every_n_seconds={every_n_seconds!r}: give a number above 0"),
            (psutil is not None, "psutil is not installed: pip install psutil"),
        )
        self.every_n_seconds = every_n_seconds
        self._readers: dict[str, Callable[[], float]] = {}
        self._due = 0.0

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        if trainer.is_global_zero:
            self._readers = _readers(module.device, trainer.run_directory)
            self._readers["system/cpu_percent"]()  # the next one is the share since this one
            self._due = time.monotonic() + self.every_n_seconds
            trainer.measure(self._read)

    def _read(self) -> dict[str, float]:
        """Read all values; those that cannot be read are named, and not read any more."""
        if time.monotonic() < self._due:
            return {}
        self._due = time.monotonic() + self.every_n_seconds
        values: dict[str, float] = {}
        failed: dict[str, list[str]] = {}
        for name, read in list(self._readers.items()):
            try:
                values[name] = float(read())
            except Exception as error:  # a driver may raise anything
                if lost_worker(error):
                    raise
                del self._readers[name]
                failed.setdefault(f"{type(error).__name__}: {one_line(error)}", []).append(name)
        for reason, names in failed.items():
            line = f"warning: SystemMonitor does not log {', '.join(names)}: {reason}"
            output.print_lines(line, error=True)
        return values


def _readers(device: torch.device, directory: Path) -> dict[str, Callable[[], float]]:
    import psutil

    readers: dict[str, Callable[[], float]] = {
        "system/cpu_percent": psutil.cpu_percent,
        "system/memory_percent": lambda: psutil.virtual_memory().percent,
        "system/disk_free_gib": lambda: psutil.disk_usage(str(directory)).free / _GIBIBYTE,
    }
    if device.type == "cuda":
        readers |= {
            "system/gpu_percent": lambda: torch.cuda.utilization(device),
            "system/gpu_memory_gib": lambda: torch.cuda.device_memory_used(device) / _GIBIBYTE,
            "system/gpu_power_watts": lambda: torch.cuda.power_draw(device) / 1000,
            "system/gpu_temperature": lambda: torch.cuda.temperature(device),
        }
    return readers
