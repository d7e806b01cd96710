"""Clocks of one measurement. Imports nothing heavy, since the time to the first step counts too."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STARTED = "BENCH_STARTED_NS"  # set by run.py just before the process is started


@dataclass(frozen=True)
class Job:
    """One measurement: who trains what, and for how long."""

    contestant: str  # the file, e.g. "raw"
    variant: str  # e.g. "bare"
    subject: str  # "mlp" or "transformer"
    fused: bool
    warmup: int
    steps: int
    epoch: int  # steps in an epoch; a checkpoint is due at the end of each

    @property
    def total(self) -> int:
        """All steps to run: the window ends when the step after it begins."""
        return self.warmup + self.steps + 1


@dataclass(frozen=True)
class Reading:
    wall: int
    waited: int
    cpu: int


def read() -> Reading:
    # The kernel counts how long this thread stood ready without getting a core. Less that wait,
    # wall time is repeatable on a shared machine, and still holds what CPU time hides: disk, sleep.
    waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return Reading(time.monotonic_ns(), waited, time.process_time_ns())


class Meter:
    """`tick` is called first in every training step; it marks a few of them and costs 0.1 µs."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.count = 0
        self.readings: dict[int, Reading] = {}
        self._due = sorted({2, job.warmup + 1, job.total}, reverse=True)
        self._next = self._due.pop()

    def tick(self) -> None:
        self.count += 1
        if self.count == self._next:
            self.readings[self.count] = read()
            self._next = self._due.pop() if self._due else 0

    def result(self) -> dict[str, float]:
        first, start, stop = (self.readings[i] for i in (2, self.job.warmup + 1, self.job.total))
        if self.count != self.job.total:
            raise SystemExit(f"{self.count} steps were run, not {self.job.total}")
        wall = stop.wall - start.wall - (stop.waited - start.waited)
        began = int(os.environ.get(STARTED, first.wall))
        return {
            "step_us": wall / self.job.steps / 1e3,
            "cpu_us": (stop.cpu - start.cpu) / self.job.steps / 1e3,
            "first_step_s": (first.wall - first.waited - began) / 1e9,
            "peak_mb": peak_memory(),
        }


def peak_memory() -> float:
    """Largest resident size in MB. Not `ru_maxrss`, which may be the parent's, before exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("no VmHWM in /proc/self/status")
