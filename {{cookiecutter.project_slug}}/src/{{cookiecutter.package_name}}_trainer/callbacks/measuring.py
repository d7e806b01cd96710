"""Callbacks that measure a fit: where the time of some steps goes, how busy the machine is."""

import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

from ..errors import lost_worker, one_line
from ..launch import output
from ..module import Run, TrainingModule
from .callback import Callback, check, checked

_GIBIBYTE = 2**30


class Profile(Callback):
    """Record where the time of some steps goes, with torch's profiler.

    It writes a Chrome trace per rank, and per repetition of the schedule, into ``profile`` of the
    run directory: ``rank-00000.TIME.pt.trace.json``. Open it in https://ui.perfetto.dev or
    ``chrome://tracing``. Steps are counted from the start of this fit, also if it resumes. After
    the last recorded step, the profiler is stopped and costs nothing.

    Args:
        wait: Number of optimizer steps to skip first.
        warmup: Number of steps to trace and discard: the first traced steps are slower.
        active: Number of steps to record.
        repeat: Number of times to do this.
        ranks: Ranks that record; ``None``: all.
        record_shapes, profile_memory, with_stack: As of ``torch.profiler.profile``.

    Source: https://docs.pytorch.org/docs/stable/profiler.html
    """

    @checked
    def __init__(
        self,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        ranks: Sequence[int] | None = (0,),
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        are_numbers = wait >= 0 and warmup >= 0 and active >= 1 and repeat >= 1
        check(
            "Profile",
            (are_numbers, "give at least wait=0, warmup=0, active=1 and repeat=1"),
            (ranks is None or len(ranks) > 0, "ranks=(): give ranks, or None for all"),
        )
        self.ranks = ranks
        self._steps = (wait + warmup + active) * repeat
        self._schedule = partial(schedule, wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._create = partial(
            profile,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
        )
        self._profiler: profile | None = None

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        every = range(trainer.world_size)
        ranks = every if self.ranks is None else self.ranks
        are_there = set(ranks) <= set(every)
        check("Profile", (are_there, f"ranks={[*ranks]}: there are {len(every)}, counted from 0"))
        if trainer.global_rank in ranks:
            folder, name = trainer.run_directory / "profile", f"rank-{trainer.global_rank:05d}"
            write = tensorboard_trace_handler(str(folder), name)
            self._profiler = self._create(schedule=self._schedule(), on_trace_ready=write)
            self._profiler.start()

    def on_after_optimizer_step(self, trainer: Run, module: TrainingModule) -> None:
        if self._profiler is not None:
            self._profiler.step()
            if self._profiler.step_num == self._steps:
                self.on_fit_end(trainer, module)

    def on_fit_end(self, trainer: Run, module: TrainingModule) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def on_exception(self, trainer: Run, module: TrainingModule, error: BaseException) -> None:
        self.on_fit_end(trainer, module)


class SystemMonitor(Callback):
    """Log values of rank 0's machine, and of its GPU.

    They are read and logged at a logged step, at most every ``every_n_seconds``:

    - ``system/cpu_percent``, ``system/memory_percent`` and ``system/disk_free_gib``: of the machine
      (in a container too), and of the disk of the run directory; they need psutil.
    - ``system/gpu_percent``, ``system/gpu_memory_gib``, ``system/gpu_power_watts`` and
      ``system/gpu_temperature`` (in degrees Celsius): of rank 0's GPU, with all of its processes,
      if a GPU is used; they need nvidia-ml-py. A value that cannot be read is named once.
    """

    @checked
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
