"""Measures pipelines, and writes docs/pipeline.md: how long processes wait, and their memory.

PYTHONPATH=PROJECT/src python benchmarks/pipeline.py           all of it: about ten minutes
PYTHONPATH=PROJECT/src python benchmarks/pipeline.py --quick   a smoke run; writes nothing

It runs in the environment of a rendered project: `make bench-pipeline`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch

from child import ONE_THREAD
from folders import writable
from memory import STEADY_MEMORY
from pipeline_one import Job

HERE = Path(__file__).parent
TIMEOUT = 600  # seconds; a measurement takes about twenty
COUNTS = (1, 2, 4, 8, 16)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
# A bubble may be this much longer than in theory, and a stage this large beside the whole model.
LONGEST, LARGEST = 1.15, 0.40
BATCH = 1024
IMAGES = {
    "whole model, one process": Job("images", "single_device", {}, devices=1, batch_size=BATCH),
    "2 stages, half of the layers each": Job(
        "images", options={"balance": [9, 10], "microbatches": 8}, batch_size=BATCH
    ),
    "2 stages, `balance: memory`": Job(
        "images", options={"balance": "memory", "microbatches": 8}, batch_size=BATCH
    ),
    "2 stages, `balance: memory`, `checkpoint: always`": Job(
        "images",
        options={"balance": "memory", "microbatches": 8, "checkpoint": "always"},
        batch_size=BATCH,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few small measurements")
    parser.add_argument("--out", type=writable, default=HERE.parent / "docs", help="of the report")
    options = parser.parse_args()
    if options.quick:
        print(*bubble_table([2], (1, 2), seconds=0.01), sep="\n")
        small = dataclasses.replace(IMAGES["2 stages, `balance: memory`"], batch_size=32)
        print(run(small))
        return
    lines = [*bubble_table([2, 4], COUNTS), "", *memory_table()]
    (options.out / "pipeline.md").write_text("\n".join([HEAD, *lines, ""]))


def run(*jobs: Job) -> list[list[dict[str, float]]]:
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


def bubble_table(
    devices: list[int], counts: tuple[int, ...], seconds: float = 0.1
) -> Iterator[str]:
    """The part of a step in which a process waits, measured and in theory."""
    yield "## Waiting"
    for processes in devices:
        cells = bubble_cells(processes, counts, seconds)
        yield from ["", f"### {processes} processes", ""]
        yield "| schedule | " + " | ".join(f"m = {count}" for count in counts) + " |"
        yield "|---" * (len(counts) + 1) + "|"
        for schedule in SCHEDULES:
            row = [cells.get((schedule, count), "") for count in counts]
            yield f"| `{schedule}` | " + " | ".join(row) + " |"
            print(schedule, processes, *row, file=sys.stderr, flush=True)


def bubble_cells(
    processes: int, counts: tuple[int, ...], seconds: float
) -> dict[tuple[str, int], str]:
    """By schedule and number of micro-batches: the bubble, and its theory in parentheses."""
    jobs = {}
    for schedule in SCHEDULES:
        rounds = 2 if schedule == "interleaved" else 1
        for count in counts:
            if rounds == 1 or count % processes == 0:
                jobs[schedule, count] = Job(
                    "sleep",
                    options={"schedule": schedule, "microbatches": count},
                    devices=processes,
                    seconds=seconds / rounds,
                    layers=processes * rounds,
                )
    cells = {}
    for (schedule, count), ranks in zip(jobs, run(*jobs.values()), strict=True):
        found = 1 - sum(each["busy_s"] / each["step_s"] for each in ranks) / processes
        rounds = 2 if schedule == "interleaved" else 1
        theory = bubble(schedule, processes, rounds, count)
        mark = "" if found <= LONGEST * theory else " **above the target**"
        cells[schedule, count] = f"{found:.3f} ({theory:.3f}){mark}"
    return cells


def bubble(schedule: str, processes: int, rounds: int, count: int) -> float:
    """In theory, with a backward in two parts that each take as long as a forward."""
    waits = processes - 1
    if schedule != "zero_bubble":
        return waits / (count * rounds + waits)
    # With few micro-batches there is not enough to fill the time.
    waiting = waits + max(0, processes - count)
    return waiting / (3 * count + waiting)


def memory_table() -> Iterator[str]:
    """Memory of each process, and beside the whole model's."""
    yield from ["## Memory", "", "| | MiB, first stage | MiB, last stage | larger one |"]
    yield "|---|---|---|---|"
    whole = 0.0
    for name, job in IMAGES.items():
        peaks = [each["peak"] for each in run(job)[0]]
        whole = whole or max(peaks)
        part = max(peaks) / whole
        last = f"{peaks[-1]:.0f}" if len(peaks) > 1 else ""
        mark = " (target: at most 40%)" if job.options.get("checkpoint") else ""
        yield f"| {name} | {peaks[0]:.0f} | {last} | {part:.0%}{mark} |"
        print(name, *peaks, f"{part:.2f}", file=sys.stderr, flush=True)


HEAD = f"""# Pipelines, measured

How long the processes of the strategy `sequential` wait, and how much memory they need. Generated
by `make bench-pipeline` (`python benchmarks/pipeline.py`); do not edit.

{date.today()}, {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, gloo.

*Waiting*: the part of a step in which a process computes nothing, with p processes and m
micro-batches, and the theory in parentheses: (p - 1) / (m + p - 1) for `gpipe` and `1f1b`,
(p - 1) / (2 m + p - 1) for `interleaved` with two stages per process, and w / (3 m + w) for
`zero_bubble`, with w = p - 1, or p - 1 + p - m if m is less than p. Layers sleep: 100 ms in the
forward of a process, 200 ms in its backward; so only communication, the step around the pipeline
and Python are added. The target is at most {LONGEST} times the theory.

*Memory*: the peak of a step of each process, above its memory before it has the model. The model is
a convolutional network ({BATCH} images of 32 x 32 pixels, Adam, 8 micro-batches, `1f1b`). Its first
layers have nearly all activations, so that half of the layers each is not balanced.
"""


if __name__ == "__main__":
    main()
