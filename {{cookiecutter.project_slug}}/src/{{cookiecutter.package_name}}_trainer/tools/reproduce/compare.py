"""Compare two runs step by step: hashes of all ranks, and logged values."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...loop.hashes import DIRECTORY

Steps = dict[int, dict[str, Any]]
# In the order in which one follows from the other.
_CAUSES = {
    "data": "the batch: the data's files, their order (seed, number of processes), or an "
    "augmentation",
    "options": "options of the optimizer: the learning rate, its schedule or scaling",
    "random": "random numbers: the seed, or code that draws other numbers",
    "loss": "the forward pass, on the same batch: code, a package, the CPU or GPU, threads, or the "
    "weights before it",
    "gradients": "the backward pass: kernels that are not deterministic, a package, the hardware, "
    "or the number of processes",
    "weights": "the step of the optimizer, or buffers: its code, a package, the hardware",
    "optimizer": "the state of the optimizer: its code, or a package",
}
_CAUSES_AT_START = {
    "weights": "the initial weights: the seed, the model's code or its options",
    "random": _CAUSES["random"],
}


@dataclass(frozen=True)
class Verdict:
    """Whether two runs are bit-equal as far as they were compared, and the lines that say so."""

    is_equal: bool
    lines: list[str]


def compare(recorded: Path, reproduced: Path, last: int) -> Verdict:
    """Compare two run directories up to a step."""
    theirs, ours = read(recorded, last), read(reproduced, last)
    if not any(theirs.values()):
        return Verdict(False, ["not compared: no hashes of steps were recorded (record_hashes)"])
    lines, ranks = [], sorted(theirs.keys() & ours.keys())
    if theirs.keys() != ours.keys():
        lines = [f"hashes of {len(ours)} ranks, recorded {len(theirs)}: rank 0 … are compared"]
    steps = sorted({step for rank in ranks for step in theirs[rank]})
    for before, step in zip([-1, *steps], steps, strict=False):
        if found := _difference(step, [(rank, theirs[rank], ours[rank]) for rank in ranks]):
            if before + 1 < step:
                found += (
                    f"; steps {before + 1} to {step - 1}, in which it may have begun, are recorded "
                    "with --trainer.record_hashes true only"
                )
            return Verdict(False, [*lines, found, *_metrics(recorded, reproduced, last)[1]])
    count, differing = _metrics(recorded, reproduced, last)
    if differing or lines or not ranks:
        return Verdict(False, [*lines, *(differing or ["the steps of the common ranks are equal"])])
    made = [step for step in steps if step]
    what = f"{len(made)} step{'s' * (len(made) != 1)}, {len(ranks)} rank{'s' * (len(ranks) != 1)}"
    return Verdict(True, [f"bit-equal: {what}, up to step {steps[-1]}; {count} logged values"])


def read(run: Path, last: int | None = None) -> dict[int, Steps]:
    """The hashes of each rank by step; of files that are no hashes none."""
    found: dict[int, Steps] = {}
    for path in sorted((run / DIRECTORY).glob("rank-*.jsonl")):
        number = path.stem.removeprefix("rank-")
        if not number.isdecimal():
            continue
        steps = found.setdefault(int(number), {})
        with path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    values = json.loads(line)
                    step = int(values["step"])
                except (ValueError, LookupError, TypeError):
                    break  # a line that was cut when the process was killed
                if last is None or step <= last:
                    steps[step] = values
    return found


def _difference(step: int, ranks: list[tuple[int, Steps, Steps]]) -> str | None:
    """The first thing that differs in a step, on the lowest rank."""
    for rank, theirs, ours in ranks:
        if step in theirs and step not in ours:
            return f"step {step}: rank {rank} has not recorded it again"
    when = f"step {step}" if step else "before the first step"
    for name, cause in (_CAUSES if step else _CAUSES_AT_START).items():
        for rank, theirs, ours in ranks:
            if step in theirs and theirs[step].get(name) != ours[step].get(name):
                return f"{when}, rank {rank}: {name} is the first that differs: {cause}"
    return None


def _metrics(recorded: Path, reproduced: Path, last: int) -> tuple[int, list[str]]:
    """How many logged values both runs have, and the first of them that differs."""
    theirs, ours = _values(recorded), _values(reproduced)
    common = [key for key in theirs if key in ours and key[0] <= last]
    for step, epoch, name in common:
        pair = ours[step, epoch, name], theirs[step, epoch, name]
        if pair[0] != pair[1]:
            line = f"{name} is {pair[0]}, recorded {pair[1]}"
            return len(common), [f"metrics.csv differs first at step {step}: {line}"]
    return len(common), []


def _values(run: Path) -> Mapping[tuple[int, str, str], str]:
    try:
        with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
            return {
                (int(row["step"]), row["epoch"], row["name"]): row["value"]
                for row in csv.DictReader(file)
            }
    except (OSError, ValueError, LookupError, TypeError):
        return {}
