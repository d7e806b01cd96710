"""Clocks and memory of a process. Imports nothing heavy: the time to the first step counts too."""

from __future__ import annotations

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
        self._due = sorted({2, job.warmup + 1, job.total}, reverse=True)
        self._next = self._due.pop()

    def tick(self) -> None:
        """Count a step."""
        self.count += 1
        if self.count == self._next:
            self.readings[self.count] = self.read()
            self._next = self._due.pop() if self._due else 0

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
    return _status("VmRSS:")


def peak() -> float:
    """Most MiB that were in memory since `forget_peak`."""
    # Not `ru_maxrss`, which may be the parent's, before exec.
    return _status("VmHWM:")


def forget_peak() -> None:
    """Reset `peak` to what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise OSError(f"no {name} in /proc/self/status")
