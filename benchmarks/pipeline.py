"""Measures pipelines, and writes docs/pipeline.md: how long processes wait, and their memory.

It runs in the environment of a rendered project: `make bench-pipeline`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import child
import report
from pipeline_rank import Job
from report import bold, table

# A process may wait this much longer than in theory, and a stage be this large beside the model.
LONGEST, LARGEST = 1.15, 0.40
# Seconds of messages and Python per micro-batch and stage, on a machine that does nothing else.
ADDED = 0.008
SCHEDULES = ("gpipe", "1f1b")
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
MEMORY_HEAD = ["", "MiB, first stage", "MiB, last stage", "larger one beside the whole model"]

# The part of a step in which processes wait, by schedule and number of micro-batches.
Waits = Mapping[str, Mapping[int, float]]


def main() -> None:
    options = report.parser(__doc__).parse_args()
    page = report.Page(options, "pipeline")
    processes, counts, seconds, batch_size = [2, 4], [1, 2, 4, 8, 16], 0.1, 1024
    if options.quick:
        processes, counts, seconds, batch_size = [2], [1, 2], 0.02, 64
    waits = {number: measure_waits(number, counts, seconds) for number in processes}
    peaks = {
        name: [rank["peak"] for rank in measure([replace(job, batch_size=batch_size)])[0]]
        for name, job in IMAGES.items()
    }
    page.publish(
        {
            "machine": report.machine("torch", more="Over gloo."),
            "waiting": "\n\n".join(waiting(number, waits[number]) for number in processes),
            "memory": table(MEMORY_HEAD, _memory(peaks)),
        }
    )


def measure(jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    """Measure in one start of the ranks: of each job, the results of ranks, first stage first."""
    ranks = child.measure("pipeline_rank.py", jobs, child.FREED_IS_RETURNED, jobs[0].devices)
    # Rank 0 has the last stage.
    return [list(results) for results in zip(*reversed(ranks), strict=True)]


def theory(processes: int, count: int) -> float:
    """The bubble of p processes and m micro-batches, in both schedules."""
    return (processes - 1) / (count + processes - 1)


def measure_waits(processes: int, counts: Sequence[int], least: float) -> Waits:
    """Measure each schedule with each number of micro-batches; `least`: seconds of a forward."""
    cells = [(schedule, count) for schedule in SCHEDULES for count in counts]
    waits: dict[str, dict[int, float]] = {schedule: {} for schedule in SCHEDULES}
    results = measure([_sleeping(processes, *cell, least) for cell in cells])
    for (schedule, count), ranks in zip(cells, results, strict=True):
        busy = [
            sum(rank["busy_s"][step] / rank["step_s"][step] for rank in ranks) / processes
            for step in range(len(ranks[0]["step_s"]))
        ]
        waits[schedule][count] = 1 - max(busy)
        print(schedule, processes, count, waits[schedule][count], file=sys.stderr, flush=True)
    return waits


def _sleeping(processes: int, schedule: str, count: int, least: float) -> Job:
    """A forward takes so long that what is added to it is small beside the bubble."""
    added = ADDED / ((LONGEST - 1) * theory(processes, count))
    seconds = max(least, added / 3)  # of a forward and a backward, which takes twice as long
    # Other work delays some steps, not all of them.
    steps = max(1, min(5, round(8 / (3 * (count + processes) * seconds))))
    options = {"schedule": schedule, "microbatches": count}
    return Job("sleep", options, processes, steps=steps, seconds=seconds)


def waiting(processes: int, waits: Waits) -> str:
    """The measured values, and the theory in parentheses."""
    rows = []
    for schedule, by_count in waits.items():
        cells = []
        for count, value in by_count.items():
            bubble = theory(processes, count)
            cells.append(f"{bold(f'{value:.3f}', value > LONGEST * bubble)} ({bubble:.3f})")
        rows.append([f"`{schedule}`", *cells])
    head = ["schedule", *(f"m = {count}" for count in waits["1f1b"])]
    return f"### {processes} processes\n\n{table(head, rows)}"


def _memory(peaks: Mapping[str, Sequence[float]]) -> Iterator[list[str]]:
    """MiB of each process at its peak."""
    for name, stages in peaks.items():
        ratio = max(stages) / max(peaks[WHOLE])
        has_target = IMAGES[name].options.get("balance") == "memory"
        last = f"{stages[-1]:.0f}" if len(stages) > 1 else ""
        larger = bold(f"{ratio:.0%}", has_target and ratio > LARGEST)
        yield [name, f"{stages[0]:.0f}", last, larger]


if __name__ == "__main__":
    main()
