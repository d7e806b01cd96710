"""Compare two runs step by step: hashes of all ranks, and logged values."""

import contextlib
import csv
import json
from pathlib import Path
from typing import Any

from ...loop.hashes import DIRECTORY

Steps = dict[int, dict[str, Any]]
_ONLY = "recorded with --trainer.record_hashes true only"
# In the order in which one follows from the other.
_CAUSES = {
    "data": "the batch: the data, its order (seed, number of processes), or an augmentation",
    "options": "options of the optimizer: the learning rate, its schedule or scaling",
    "random": "random numbers: the seed, or code that draws other numbers",
    "loss": "the forward pass: code, a package, the hardware, threads, or the weights before it",
    "gradients": "the backward pass: its kernels, a package, the hardware, the number of processes",
    "weights": "the initial weights, the step of the optimizer, or buffers: code, a package",
    "optimizer": "the state of the optimizer: its code, or a package",
}


def compare(recorded: Path, reproduced: Path, last: int) -> tuple[bool, list[str]]:
    """Whether two run directories are bit-equal up to a step, and the lines that say so."""
    theirs, ours = read(recorded), read(reproduced)
    ranks = sorted(theirs.keys() & ours.keys())
    steps = sorted({step for rank in ranks for step in theirs[rank] if step <= last})
    if not steps:
        return False, ["not compared: no hashes of steps were recorded (record_hashes)"]
    count, differing = _metrics(recorded, reproduced, last)
    lines = []
    if theirs.keys() != ours.keys():
        lines = [f"hashes of {len(ours)} ranks, recorded {len(theirs)}: rank 0 … are compared"]
    for before, step in zip([-1, *steps], steps, strict=False):
        if found := _difference(step, [(rank, theirs[rank], ours[rank]) for rank in ranks]):
            if before + 1 < step:
                between = f"steps {before + 1} to {step - 1}, in which it may have begun"
                found += f"; {between}, are {_ONLY}"
            return False, [*lines, found, *differing]
    if differing or lines:
        return False, [*lines, *(differing or ["the steps of the common ranks are equal"])]
    made = len(steps) - (0 in steps)
    what = f"{made} step{'s' * (made != 1)}, {len(ranks)} rank{'s' * (len(ranks) != 1)}"
    rest = f"; steps {steps[-1] + 1} to {last} are {_ONLY}" * (steps[-1] < last)
    return True, [f"bit-equal: {what}, up to step {steps[-1]}; {count} logged values{rest}"]


def read(run: Path) -> dict[int, Steps]:
    """The hashes of each rank by step; of files that are no hashes none."""
    found: dict[int, Steps] = {}
    for path in sorted((run / DIRECTORY).glob("rank-*.jsonl")):
        # The last line was cut if the process was killed.
        with contextlib.suppress(ValueError, LookupError, TypeError):
            steps = found.setdefault(int(path.stem.removeprefix("rank-")), {})
            for values in map(json.loads, path.read_text().splitlines()):
                steps[int(values["step"])] = values
    return found


def _difference(step: int, ranks: list[tuple[int, Steps, Steps]]) -> str | None:
    """The first thing that differs in a step, on the lowest rank."""
    for rank, theirs, ours in ranks:
        if step in theirs and step not in ours:
            return f"step {step}: rank {rank} has not recorded it again"
    when = f"step {step}" if step else "before the first step"
    for name, cause in _CAUSES.items():
        for rank, theirs, ours in ranks:
            if step in theirs and theirs[step].get(name) != ours[step].get(name):
                return f"{when}, rank {rank}: {name} is the first that differs: {cause}"
    return None


def _metrics(recorded: Path, reproduced: Path, last: int) -> tuple[int, list[str]]:
    """How many logged values both runs have, and the first of them that differs."""
    theirs, ours = _values(recorded), _values(reproduced)
    common = [key for key in theirs if key in ours and int(key[0]) <= last]
    for key in (key for key in common if ours[key] != theirs[key]):
        line = f"{key[2]} is {ours[key]}, recorded {theirs[key]}"
        return len(common), [f"metrics.csv differs first at step {key[0]}: {line}"]
    return len(common), []


def _values(run: Path) -> dict[tuple[str, str, str], str]:
    with contextlib.suppress(OSError, ValueError, LookupError):
        rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
        return {(row["step"], row["epoch"], row["name"]): row["value"] for row in rows}
    return {}
