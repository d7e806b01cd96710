"""Long runs: memory, descriptors, threads and the time of a step stay what they were.

``python -m long_runs [--only ddp | epochs] [--scale 0.05]``

One run has 20,000 steps with ``ddp`` on two processes, the other one 200 epochs on one process,
each with a validation, a checkpoint, two loggers and loader workers that are started again. Each
rank reads what its process uses a few hundred times. The last tenth of a run is compared with the
second one: in the first one torch and Python load and cache what they need. The time of a step is
processor time, in units of a fixed piece of work that is timed with each reading: other work on the
machine makes both longer.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.project import start

from processes import assert_nothing_left, at_root

Reading = dict[str, float]
TENTHS = 10
READINGS = 200  # of a run, on each rank
PATIENCE = 3600.0  # seconds
# Bounds: memory that a long run may take in addition, MiB; and the ratio of times of a step.
MORE_MEMORY, MORE_TIME = 8.0, 1.5
MEMORY = ("resident", "anonymous", "launcher")
COUNTS = ("descriptors", "threads")


@dataclass(frozen=True)
class Run:
    """A long run: the options of the trainer, and the arguments of the module."""

    name: str
    steps: int
    processes: int
    options: dict[str, Any]
    model: dict[str, Any]


def runs(scale: float) -> list[Run]:
    """The long runs, or as small a part of them."""
    steps, epochs = round(20_000 * scale), round(200 * scale)
    per_epoch = 50
    shared = {"default_root_dir": "runs", "run_name": "run", "log_every_n_steps": 10}
    ddp = {"strategy": "ddp", "devices": 2, "max_steps": steps, "checkpoint_every_n_steps": 500}
    alone = {"devices": 1, "max_epochs": epochs, "async_checkpoints": True}
    return [
        Run(
            f"{steps:,} steps, ddp on two processes",
            steps,
            2,
            {**shared, **ddp, "val_every_n_steps": 500},
            {"every": max(1, steps // READINGS), "workers": 0, "samples": 8 * 1000},
        ),
        Run(
            f"{epochs} epochs, one process",
            epochs * per_epoch,
            1,
            {**shared, **alone},
            {"every": per_epoch // 2, "workers": 1, "samples": 4 * per_epoch},
        ),
    ]


def train(run: Run, folder: Path) -> list[list[Reading]]:
    """Run it to its end; the readings of each rank."""
    job = json.dumps({"options": run.options, "model": run.model})
    command = ["-m", "long_runs_subject", job, folder]
    process = start(command, cwd=folder, extra=at_root(), fresh=True)
    try:
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert_nothing_left(folder)
    paths = [folder / f"rank-{rank}.jsonl" for rank in range(run.processes)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def tenths(readings: Sequence[Reading], steps: int) -> list[Reading]:
    """The median of each quantity in each tenth of the steps; ``step_ms`` is of processor time."""
    per_tenth: list[list[Reading]] = [[] for _ in range(TENTHS)]
    for before, after in pairwise(readings):
        taken = (after["cpu_s"] - before["cpu_s"]) / (after["step"] - before["step"])
        tenth = min(int((after["step"] - 1) * TENTHS / steps), TENTHS - 1)
        per_tenth[tenth].append({**after, "step_ms": 1000 * taken})
    names = [name for name in per_tenth[0][0] if name not in ("step", "cpu_s")]
    return [
        {name: statistics.median(row[name] for row in rows) for name in names} for rows in per_tenth
    ]


def problems(readings: Sequence[Reading]) -> list[str]:
    """One line for each quantity that is not flat from the second tenth to the last one."""
    early, late = readings[1], readings[-1]
    lines = [
        f"{name}: {early[name]:.1f} MiB, then {late[name]:.1f} (at most {MORE_MEMORY:g} more)"
        for name in MEMORY
        if name in early and late[name] > early[name] + MORE_MEMORY
    ]
    lines += [
        f"{name}: {early[name]:g}, then {late[name]:g}"
        for name in COUNTS
        if late[name] != early[name]
    ]
    before, after = (reading["step_ms"] / reading["yardstick_ms"] for reading in (early, late))
    if after > MORE_TIME * before:
        lines.append(
            f"a step: {before:.2f} times the yardstick, then {after:.2f} (at most {MORE_TIME:g} "
            "times as much)"
        )
    return lines


def table(name: str, ranks: Sequence[Sequence[Reading]]) -> list[str]:
    """Rows of the table in docs/reliability.md of a project: rank 0, and all ranks' bounds."""
    rows = []
    for number, readings in enumerate(ranks):
        who = name if len(ranks) == 1 else f"{name}, rank {number}"
        for tenth in (0, 1, TENTHS // 2 - 1, TENTHS - 1):
            reading = readings[tenth]
            rows.append(
                f"| {who} | {tenth + 1} | {reading['resident']:.0f} | {reading['anonymous']:.0f} "
                f"| {reading['descriptors']:g} | {reading['threads']:g} | {reading['step_ms']:.2f} "
                f"| {reading['yardstick_ms']:.2f} |"
            )
    return rows


HEAD = [
    "| | tenth | MiB resident | MiB anonymous | descriptors | threads | processor ms per step "
    "| of the yardstick |",
    "|---|---|---|---|---|---|---|---|",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["ddp", "epochs"])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the steps and epochs")
    options = parser.parse_args(arguments)
    print(*HEAD, sep="\n", flush=True)
    failed = []
    for run in runs(options.scale):
        if options.only and options.only not in run.name:
            continue
        with tempfile.TemporaryDirectory(prefix="long-") as folder:
            ranks = [tenths(readings, run.steps) for readings in train(run, Path(folder))]
        print(*table(run.name, ranks), sep="\n", flush=True)
        failed += [
            f"{run.name}, rank {number}: {line}"
            for number, readings in enumerate(ranks)
            for line in problems(readings)
        ]
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
