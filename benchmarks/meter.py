"""Clocks and memory of a process. Imports nothing heavy: the time to the first step counts too."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from child import STARTED
from job import Job


@dataclass(frozen=True)
class Reading:
    """Nanoseconds of the clock, without a core, and of the processor."""

    wall: int
    waited: int
    cpu: int


def read() -> Reading:
    """Read the clocks."""
    # The kernel counts how long this thread stood ready without getting a core. Less that wait,
    # wall time is repeatable on a shared machine, and still holds what CPU time hides: disk, sleep.
    waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return Reading(time.monotonic_ns(), waited, time.process_time_ns())


def seconds_between(start: Reading, stop: Reading) -> float:
    """Wall time without that of waiting for a core."""
    return (stop.wall - start.wall - (stop.waited - start.waited)) / 1e9


class Meter:
    """`tick` is called first in every training step; it marks a few of them and costs 0.1 µs."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.count = 0
        self.readings: dict[int, Reading] = {}
        self._marks = frozenset({2, job.warmup + 1, job.total})

    def tick(self) -> None:
        """Count a step."""
        self.count += 1
        if self.count in self._marks:
            self.readings[self.count] = self.read()

    def read(self) -> Reading:
        """Read the clocks; on a device, when it has done what was asked of it."""
        return read()

    def peak(self) -> float:
        """Most MiB until the end."""
        return peak()

    def result(self) -> dict[str, float]:
        """What a step takes, the first one, and memory."""
        if self.count != self.job.total:
            raise SystemExit(f"{self.count} steps were run, not {self.job.total}")
        first, start, stop = (self.readings[i] for i in (2, self.job.warmup + 1, self.job.total))
        began = int(os.environ.get(STARTED, first.wall))
        return {
            "step_ms": seconds_between(start, stop) / self.job.steps * 1e3,
            "cpu_ms": (stop.cpu - start.cpu) / self.job.steps / 1e6,
            "first_step_s": (first.wall - first.waited - began) / 1e9,
            "peak_mib": self.peak(),
        }


def resident() -> float:
    """MiB of this process that are in memory now."""
    return mib_in("/proc/self/status", "VmRSS:")


def peak() -> float:
    """Most MiB that were in memory since `forget_peak`."""
    # Not `ru_maxrss`, which may be the parent's, before exec.
    return mib_in("/proc/self/status", "VmHWM:")


def forget_peak() -> None:
    """Reset `peak` to what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def mib_in(file: str, name: str) -> float:
    """MiB in the line of a file of /proc that begins with a name."""
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def require_memory(needed: float, fewer: str) -> None:
    """Refuse what would fill the memory of this machine; `fewer`: what to give instead."""
    free = mib_in("/proc/meminfo", "MemAvailable:") * 2**20
    if free < needed:
        needs = f"this needs {needed / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free"
        raise SystemExit(f"{needs}: give fewer {fewer}")
