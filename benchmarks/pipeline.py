"""Measures pipelines, and writes docs/pipeline.md: how long processes wait, and their memory.

PYTHONPATH=PROJECT/src python benchmarks/pipeline.py           all of it: about twenty minutes
PYTHONPATH=PROJECT/src python benchmarks/pipeline.py --quick   a smoke run; writes nothing

It runs in the environment of a rendered project: `make bench-pipeline`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pipeline_report
from child import ONE_THREAD
from folders import writable
from memory import STEADY_MEMORY
from pipeline_one import Job
from pipeline_report import COLORS, LONGEST, Memory, Wait

HERE = Path(__file__).parent
TIMEOUT = 1800  # seconds; the longest start takes about ten minutes
# Seconds of messages and Python per micro-batch and stage, on a machine that does nothing else.
ADDED = 0.008
COUNTS = (1, 2, 4, 8, 16)
SCHEDULES = tuple(COLORS)
BATCH = 1024
MEMORY = {"balance": "memory", "microbatches": 8}
IMAGES = {
    "whole model, one process": Job("images", "single_device", {}, devices=1),
    "2 stages, half of the layers each": Job(
        "images", options={"balance": [9, 10], "microbatches": 8}
    ),
    "2 stages, `balance: memory`": Job("images", options=MEMORY),
    "2 stages, `balance: memory`, `checkpoint: always`": Job(
        "images", options={**MEMORY, "checkpoint": "always"}
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few small measurements")
    parser.add_argument("--out", type=writable, default=HERE.parent / "docs", help="of the report")
    options = parser.parse_args()
    counts: tuple[int, ...] = COUNTS
    processes, seconds, batch_size = [2, 4], 0.1, BATCH
    if options.quick:
        processes, counts, seconds, batch_size = [2], (1, 2), 0.02, 64
    waits = [wait for count in processes for wait in measure_waits(count, counts, seconds)]
    memory = list(measure_memory(batch_size))
    report = pipeline_report.markdown(waits, memory, batch_size)
    svg = pipeline_report.plot(waits)
    print(*pipeline_report.verdict(waits, memory), sep="\n")
    if options.quick:
        print(report)
        return
    (options.out / "pipeline.md").write_text(report)
    (options.out / "pipeline.svg").write_text(svg)


def run(*jobs: Job) -> list[list[dict[str, Any]]]:
    """Measure in one start of the ranks: for each job, what each rank found, first stage first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "pipeline_one.py")]
        done = subprocess.run(
            [*command, json.dumps([*map(dataclasses.asdict, jobs)]), folder],
            env=os.environ | ONE_THREAD | STEADY_MEMORY,
            timeout=TIMEOUT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{jobs}: {done.stderr}")
        ranks = reversed(range(jobs[0].devices))
        found = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in ranks]
        return [list(each) for each in zip(*found, strict=True)]


def measure_waits(processes: int, counts: tuple[int, ...], seconds: float) -> Iterator[Wait]:
    """The part of a step in which a process waits, of each schedule and number of micro-batches."""
    jobs = {
        (schedule, count): Job(
            "sleep",
            options={"schedule": schedule, "microbatches": count},
            devices=processes,
            steps=_steps(3 * (count + processes) * _seconds(seconds, processes, count)),
            seconds=_seconds(seconds, processes, count),
            layers=processes,
        )
        for schedule in SCHEDULES
        for count in counts
    }
    for (schedule, count), ranks in zip(jobs, run(*jobs.values()), strict=True):
        parts = [
            sum(rank["busy_s"][step] / rank["step_s"][step] for rank in ranks) / processes
            for step in range(len(ranks[0]["step_s"]))
        ]
        found = 1 - max(parts)
        theory = pipeline_report.theory(processes, count)
        wait = Wait(schedule, processes, count, found, theory)
        print(schedule, processes, count, pipeline_report.cell(wait), file=sys.stderr, flush=True)
        yield wait


def _seconds(least: float, processes: int, count: int) -> float:
    """How long a process' forward takes: so long that what is added is small beside the bubble."""
    added = ADDED / ((LONGEST - 1) * pipeline_report.theory(processes, count))
    return max(least, added / 3)  # of a forward and a backward, which takes twice as long


def _steps(seconds: float) -> int:
    """How many steps are measured that take so long: other work delays some, not all of them."""
    return max(1, min(5, round(8 / seconds)))


def measure_memory(batch_size: int) -> Iterator[Memory]:
    """Memory of each process; first that of the whole model in one."""
    for name, job in IMAGES.items():
        peaks = [each["peak"] for each in run(dataclasses.replace(job, batch_size=batch_size))[0]]
        print(name, *peaks, file=sys.stderr, flush=True)
        yield Memory(name, peaks, has_target=job.options.get("balance") == "memory")


if __name__ == "__main__":
    main()
