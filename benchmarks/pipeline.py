"""Measures pipelines, and writes docs/pipeline.md: how long processes wait, and their memory.

PYTHONPATH=PROJECT/src python benchmarks/pipeline.py           all of it: about twenty minutes
PYTHONPATH=PROJECT/src python benchmarks/pipeline.py --quick   a smoke run; writes nothing

It runs in the environment of a rendered project: `make bench-pipeline`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import report
from child import FREED_IS_RETURNED
from child import measure as measured
from pipeline_rank import Job
from plots import GRAY, ORANGE, Curve, Panel, panels
from report import bold, table

TIMEOUT = 1800  # seconds; the longest start takes about ten minutes
# A process may wait this much longer than in theory, and a stage be this large beside the model.
LONGEST, LARGEST = 1.15, 0.40
# Seconds of messages and Python per micro-batch and stage, on a machine that does nothing else.
ADDED = 0.008
COUNTS = (1, 2, 4, 8, 16)
SCHEDULES = {"gpipe": GRAY, "1f1b": ORANGE}
BATCH = 1024
WHOLE = "whole model, one process"
BALANCED: dict[str, Any] = {"balance": "memory", "microbatches": 8}
IMAGES = {
    WHOLE: Job("images", devices=1),
    "2 stages, half of the layers each": Job("images", BALANCED | {"balance": [9, 10]}),
    "2 stages, `balance: memory`": Job("images", BALANCED),
    "2 stages, `balance: memory`, `checkpoint: always`": Job(
        "images", BALANCED | {"checkpoint": "always"}
    ),
}


@dataclass(frozen=True)
class Wait:
    """The part of a step in which processes wait."""

    schedule: str
    processes: int
    count: int
    found: float

    @property
    def theory(self) -> float:
        """Of p processes and m micro-batches, in both schedules."""
        return theory(self.processes, self.count)

    @property
    def is_long(self) -> bool:
        return self.found > LONGEST * self.theory

    @property
    def cell(self) -> str:
        """The measured value, and the theory in parentheses."""
        return f"{bold(f'{self.found:.3f}', self.is_long)} ({self.theory:.3f})"


Peaks = dict[str, list[float]]  # MiB of each process at its peak, first stage first


def main() -> None:
    options = report.parser(__doc__).parse_args()
    page = report.Page(options, "pipeline")
    counts: Sequence[int] = COUNTS
    processes, seconds, batch_size = [2, 4], 0.1, BATCH
    if options.quick:
        processes, counts, seconds, batch_size = [2], (1, 2), 0.02, 64
    waits = {number: measure_waits(number, counts, seconds) for number in processes}
    peaks = {name: measure_peaks(name, batch_size) for name in IMAGES}
    parts = {
        "machine": report.machine("torch", more="Over gloo."),
        "waiting": "\n\n".join(
            f"### {number} processes\n\n{table(['schedule', *_counts(found)], _waiting(found))}"
            for number, found in waits.items()
        ),
        "memory": table(MEMORY_HEAD, _memory(peaks)),
    }
    page.publish(parts, panels([_panel(found) for found in waits.values()], SCHEDULES, NOTE))


def measure(*jobs: Job) -> list[list[dict[str, Any]]]:
    """Measure in one start of the ranks: for each job, what each rank found, first stage first."""
    ranks = measured("pipeline_rank.py", jobs, FREED_IS_RETURNED, jobs[0].devices, TIMEOUT)
    # Rank 0 has the last stage.
    return [list(each) for each in zip(*reversed(ranks), strict=True)]


def theory(processes: int, count: int) -> float:
    """The bubble of p processes and m micro-batches."""
    return (processes - 1) / (count + processes - 1)


def measure_waits(processes: int, counts: Sequence[int], least: float) -> list[Wait]:
    """The part of a step in which a process waits, of each schedule and number of micro-batches."""
    jobs = {}
    for schedule in SCHEDULES:
        for count in counts:
            seconds = _seconds(least, processes, count)
            jobs[schedule, count] = Job(
                "sleep",
                {"schedule": schedule, "microbatches": count},
                devices=processes,
                # Other work delays some steps, not all of them.
                steps=max(1, min(5, round(8 / (3 * (count + processes) * seconds)))),
                seconds=seconds,
            )
    waits = []
    for (schedule, count), ranks in zip(jobs, measure(*jobs.values()), strict=True):
        busy = [
            sum(rank["busy_s"][step] / rank["step_s"][step] for rank in ranks) / processes
            for step in range(len(ranks[0]["step_s"]))
        ]
        waits.append(Wait(schedule, processes, count, 1 - max(busy)))
        print(schedule, processes, count, waits[-1].cell, file=sys.stderr, flush=True)
    return waits


def _seconds(least: float, processes: int, count: int) -> float:
    """How long a process' forward takes: so long that what is added is small beside the bubble."""
    added = ADDED / ((LONGEST - 1) * theory(processes, count))
    return max(least, added / 3)  # of a forward and a backward, which takes twice as long


def measure_peaks(name: str, batch_size: int) -> list[float]:
    """MiB of each process at its peak."""
    (ranks,) = measure(replace(IMAGES[name], batch_size=batch_size))
    peaks = [rank["peak"] for rank in ranks]
    print(name, *peaks, file=sys.stderr, flush=True)
    return peaks


def _counts(waits: Sequence[Wait]) -> list[str]:
    return [f"m = {count}" for count in dict.fromkeys(wait.count for wait in waits)]


def _waiting(waits: Sequence[Wait]) -> Iterator[list[str]]:
    for schedule in SCHEDULES:
        yield [f"`{schedule}`", *(wait.cell for wait in waits if wait.schedule == schedule)]


MEMORY_HEAD = ["", "MiB, first stage", "MiB, last stage", "larger one beside the whole model"]


def _memory(peaks: Peaks) -> Iterator[list[str]]:
    for name, found in peaks.items():
        part = max(found) / max(peaks[WHOLE])
        has_target = IMAGES[name].options.get("balance") == "memory"
        last = f"{found[-1]:.0f}" if len(found) > 1 else ""
        yield [name, f"{found[0]:.0f}", last, bold(f"{part:.0%}", has_target and part > LARGEST)]


NOTE = "points: measured; lines: theory"


def _panel(waits: Sequence[Wait]) -> Panel:
    """Measurements of so many processes as points on lines of theory."""
    highest = max(max(each.found, each.theory) for each in waits)
    curves = []
    for schedule, color in SCHEDULES.items():
        own = [each for each in waits if each.schedule == schedule]
        points = [(each.count, each.found) for each in own]
        curves.append(Curve(color, points, line=[(each.count, each.theory) for each in own]))
    return Panel(
        f"p = {waits[0].processes} processes: part of a step",
        "m, micro-batches",
        list(dict.fromkeys(each.count for each in waits)),
        {step / 10: f"{step / 10:.1f}" for step in range(math.ceil(highest * 10) + 1)},
        curves,
    )


if __name__ == "__main__":
    main()
