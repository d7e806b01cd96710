"""Log how busy the machine and the GPU are."""

import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..errors import ConfigurationError, one_line
from ..module import Run, TrainingModule
from .callback import Callback

_Readers = dict[str, Callable[[], float]]
_GIBIBYTE = 2**30


class SystemMonitor(Callback):
    """Log values of rank 0's machine, and of its GPU.

    A thread reads them every ``every_n_seconds``; the newest values are logged with the speed of
    the next logged step, and are not among ``trainer.metrics``:

    - ``system/cpu_percent``, ``system/memory_percent`` and ``system/disk_free_gib``: of the machine
      (in a container too), and of the disk of the run directory; they need psutil.
    - ``system/gpu_percent``, ``system/gpu_memory_gib``, ``system/gpu_power_watts`` and
      ``system/gpu_temperature`` (in degrees Celsius): of rank 0's GPU, with all of its processes,
      if a GPU is used; they need nvidia-ml-py. A value that cannot be read is named once.

    Args:
        every_n_seconds: Seconds between two readings; the first is taken after this time.

    Raises:
        ConfigurationError: The argument is out of range, or psutil is not installed.
    """

    def __init__(self, every_n_seconds: float = 10.0) -> None:
        problems = []
        if not 0 < every_n_seconds < threading.TIMEOUT_MAX:
            given = f"every_n_seconds={every_n_seconds!r}"
            problems.append(f"SystemMonitor: {given}: give a number above 0")
        if importlib.util.find_spec("psutil") is None:
            problems.append("SystemMonitor needs psutil: pip install psutil")
        if problems:
            raise ConfigurationError(problems)
        self.every_n_seconds = every_n_seconds
        self._newest: Mapping[str, float] = {}
        self._thread = threading.Thread()
        self._ended = threading.Event()

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        self.on_fit_end(trainer, module)  # of a fit that was interrupted
        if not trainer.is_global_zero:
            return
        readers = _readers(module.device, trainer.run_directory)
        ended = self._ended = threading.Event()

        def keep_reading() -> None:
            _read(readers)  # a share of CPU time is that since the reading before
            while not ended.wait(self.every_n_seconds) and module.trainer_state.run is trainer:
                self._newest = _read(readers)

        self._newest = {}
        trainer.measure(self._take)
        self._thread = threading.Thread(target=keep_reading, name="system-monitor", daemon=True)
        self._thread.start()

    def on_fit_end(self, trainer: Run, module: TrainingModule) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def on_exception(self, trainer: Run, module: TrainingModule, error: BaseException) -> None:
        self.on_fit_end(trainer, module)

    def _take(self) -> Mapping[str, float]:
        newest, self._newest = self._newest, {}
        return newest


def _readers(device: torch.device, directory: Path) -> _Readers:
    import psutil

    existing = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    readers: _Readers = {
        "system/cpu_percent": psutil.cpu_percent,
        "system/memory_percent": lambda: psutil.virtual_memory().percent,
        "system/disk_free_gib": lambda: psutil.disk_usage(str(existing)).free / _GIBIBYTE,
    }
    if device.type == "cuda":
        readers |= {
            "system/gpu_percent": lambda: torch.cuda.utilization(device),
            "system/gpu_memory_gib": lambda: torch.cuda.device_memory_used(device) / _GIBIBYTE,
            "system/gpu_power_watts": lambda: torch.cuda.power_draw(device) / 1000,
            "system/gpu_temperature": lambda: torch.cuda.temperature(device),
        }
    return readers


def _read(readers: _Readers) -> dict[str, float]:
    """Read all values; those that cannot be read are named, and not read any more."""
    values: dict[str, float] = {}
    failed: dict[str, list[str]] = {}
    for name, read in list(readers.items()):
        try:
            values[name] = float(read())
        except Exception as error:  # a driver may raise anything
            del readers[name]
            failed.setdefault(f"{type(error).__name__}: {one_line(error)}", []).append(name)
    for reason, names in failed.items():
        line = f"warning: SystemMonitor does not log {', '.join(names)}: {reason}"
        print(line, file=sys.stderr, flush=True)
    return values
