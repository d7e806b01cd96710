"""Compares what `plan` says of a rank's memory with what is measured, and writes docs/plan.csv.

PYTHONPATH=PROJECT/src python benchmarks/plan.py          all of it: an hour on two cores
PYTHONPATH=PROJECT/src python benchmarks/plan.py --only LongGPT --ranks 2 --strategies fsdp

It measures as benchmarks/memory.py does, in the environment of a rendered project.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from folders import writable
from memory import HERE, available, measure
from memory_entries import ENTRIES

MiB = 2**20


@dataclass(frozen=True)
class Case:
    """A model, and options of the trainer under which it is planned and measured."""

    model: str
    precision: str = "32-true"
    checkpointing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = [self.model, self.precision.removeprefix("32-true")]
        return ", ".join([*filter(None, parts), *(["checkpointing"] if self.checkpointing else [])])


CASES = (
    Case("LongGPT"),
    Case("Convolutions"),
    Case("Embeddings"),
    Case("LongGPT", "bf16-mixed"),
    Case("LongGPT", checkpointing=("Block",)),
)
# Of the last cases, a strategy of each kind.
FEW = ("ddp", "fsdp", "deepspeed_stage_2")


def planned(case: Case, ranks: int) -> dict[str, dict[str, Any]]:
    """The rows of a plan by strategy."""
    command = [sys.executable, "-m", "my_project", "plan", "--json", "--accelerator", "cpu"]
    command += ["--devices", str(ranks), "--memory", "64G", "--seconds", "300"]
    command += ["--model", f"plan_subject.{case.model}", "--trainer.max_steps", "5"]
    command += ["--trainer.precision", case.precision]
    if case.checkpointing:
        command += ["--trainer.activation_checkpointing", json.dumps(case.checkpointing)]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    return {row["name"]: row["memory"] for row in found["rows"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[case.model for case in CASES])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", default=[entry.name for entry in ENTRIES])
    parser.add_argument("--out", type=writable, default=HERE.parent / "docs")
    options = parser.parse_args()
    entries, left_out = available([each for each in ENTRIES if each.name in options.strategies])
    print(*left_out, sep="\n", file=sys.stderr)
    path: Path = options.out / "plan.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    for case in (case for case in CASES if case.model in options.only):
        for ranks in options.ranks:
            plan = planned(case, ranks)
            for entry in entries:
                if (case.precision, case.checkpointing) != ("32-true", ()) and (
                    entry.name not in FEW
                ):
                    continue
                key = {"model": case.name, "ranks": str(ranks), "strategy": entry.name}
                job = {**entry.job, "model": case.model, "steps": 1}
                job |= {"precision": case.precision, "checkpointing": case.checkpointing}
                found = next((row for row in rows if key.items() <= row.items()), {})
                if not found:
                    found = {**key, "measured": f"{measure(case.name, job, ranks)['peak']:.0f}"}
                    rows.append(found)
                own = plan[entry.name]["peak"] / MiB
                found |= {"planned": f"{own:.0f}", "mark": plan[entry.name]["mark"]}
                found["ratio"] = f"{own / float(found['measured']):.3f}"
                print(", ".join(found.values()), file=sys.stderr, flush=True)
                with path.open("w") as file:
                    writer = csv.DictWriter(file, [*key, "planned", "measured", "ratio", "mark"])
                    writer.writeheader()
                    writer.writerows(rows)
    near = sum(abs(float(row["ratio"]) - 1) <= 0.1 for row in rows)
    print(f"{near} of {len(rows)} within 10 %")


if __name__ == "__main__":
    main()
