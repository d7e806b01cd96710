"""Compares what `plan` says of a rank's memory with what is measured, and writes docs/plan.csv.

It measures as benchmarks/memory.py does, in the environment of a rendered project: `make
bench-plan`. All of it takes an hour on two cores; `--only LongGPT --ranks 2 --strategies fsdp`.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from child import HERE
from memory import ENTRIES, available, measure
from report import DOCS, writable

# Under other options than the usual ones, a strategy of each kind.
FEW = ("ddp", "fsdp", "deepspeed_stage_2")
FIELDS = ("model", "ranks", "strategy", "planned", "measured", "ratio", "mark")


@dataclass(frozen=True)
class Case:
    """A model, and options of the trainer under which it is planned and measured."""

    model: str
    precision: str = "32-true"
    checkpointing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [self.model, self.precision.removeprefix("32-true")]
        return ", ".join(filter(None, [*words, "checkpointing" if self.checkpointing else ""]))


CASES = (
    Case("LongGPT"),
    Case("Convolutions"),
    Case("Embeddings"),
    Case("LongGPT", "bf16-mixed"),
    Case("LongGPT", checkpointing=("Block",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[case.model for case in CASES])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", choices=ENTRIES, default=[*ENTRIES])
    parser.add_argument("--out", type=writable, default=DOCS)
    options = parser.parse_args()
    strategies, left_out = available(options.strategies)
    print(*left_out, sep="\n", file=sys.stderr)
    path: Path = options.out / "plan.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    for case in (case for case in CASES if case.model in options.only):
        for ranks in options.ranks:
            plan = planned(case, ranks)
            for strategy in strategies:
                if case.name == case.model or strategy in FEW:
                    row = row_of(rows, case, ranks, strategy)
                    compare(row, plan[strategy])
                    print(", ".join(row[field] for field in FIELDS), file=sys.stderr, flush=True)
                    write(path, rows)
    near = sum(abs(float(row["ratio"]) - 1) <= 0.1 for row in rows)
    print(f"{near} of {len(rows)} within 10 %")


def planned(case: Case, ranks: int) -> dict[str, dict[str, Any]]:
    """The memory of a plan by strategy."""
    command = [sys.executable, "-m", "my_project", "plan", "--json", "--accelerator", "cpu"]
    command += ["--devices", str(ranks), "--memory", "64G", "--seconds", "300"]
    command += ["--model", f"memory_rank.{case.model}", "--trainer.max_steps", "5"]
    command += ["--trainer.precision", case.precision]
    if case.checkpointing:
        command += ["--trainer.activation_checkpointing", json.dumps(case.checkpointing)]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr[-2000:]}")
    return {row["name"]: row["memory"] for row in json.loads(done.stdout)["rows"]}


def row_of(rows: list[dict[str, str]], case: Case, ranks: int, strategy: str) -> dict[str, str]:
    """The row of a cell; it is measured if it has not been before."""
    key = {"model": case.name, "ranks": str(ranks), "strategy": strategy}
    for row in rows:
        if key.items() <= row.items():
            return row
    peak = measure(strategy, ranks, steps=1, **asdict(case))["peak"]
    rows.append({**key, "measured": f"{peak:.0f}"})
    return rows[-1]


def compare(row: dict[str, str], plan: dict[str, Any]) -> None:
    """Add what is planned now."""
    peak = plan["peak"] / 2**20
    row |= {"planned": f"{peak:.0f}", "mark": plan["mark"]}
    row["ratio"] = f"{peak / float(row['measured']):.3f}"


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write all rows: a run that is stopped goes on there."""
    with path.open("w") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
