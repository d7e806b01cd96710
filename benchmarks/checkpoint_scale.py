"""Measures large checkpoints beside torch.distributed.checkpoint, and writes docs/checkpoints.md.

PYTHONPATH=PROJECT/src python benchmarks/checkpoint_scale.py           a billion parameters
PYTHONPATH=PROJECT/src python benchmarks/checkpoint_scale.py --quick   a smoke run; writes nothing

A billion parameters in float32 with Adam's moments, sharded over 8 processes, need 18 GB of memory
and 40 GB of disk; smaller models: --parameters. It runs in the environment of a rendered project:
`make bench-checkpoints`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkpoint_report
from checkpoint_rank import Job
from child import ONE_THREAD, rank_variables
from folders import writable
from memory import STEADY_MEMORY

HERE = Path(__file__).parent
TIMEOUT = 3600  # seconds
LAYERS = 60
# Of each parameter: itself, two moments, and what processes need besides.
NEEDED_BYTES = 18


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of a tiny model")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=10_000, help="of the model of many tensors")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-stalls", action="store_true", help="leave out the stalls of steps")
    parser.add_argument("--folder", type=writable, help="where to save; default: a temporary one")
    parser.add_argument("--out", type=writable, default=HERE.parent / "docs", help="of the report")
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.ranks, options.tensors, options.rounds = 1e6, 2, 100, 1
    check_memory(options.parameters)
    width = math.isqrt(int(options.parameters) // LAYERS)
    large, many = Job(width, LAYERS, options.rounds), Job(8, options.tensors, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        stalls: list[dict[str, Any]] = []
        if not options.no_stalls:
            stalls = measure_stalls(Path(folder), options.rounds, options.quick)
        found = checkpoint_report.Found(
            large, measure(large, options.ranks, folder), many, measure(many, 1, folder), stalls
        )
    text = checkpoint_report.markdown(found)
    print(text)
    if not options.quick:
        (options.out / "checkpoints.md").write_text(text)


def check_memory(parameters: float) -> None:
    """Refuse a model that would fill the memory of this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    if free < NEEDED_BYTES * parameters:
        raise SystemExit(
            f"{parameters:.3g} parameters need {NEEDED_BYTES * parameters / 1e9:.3g} GB of memory, "
            f"and {free / 1e9:.3g} GB are free: give fewer --parameters"
        )


def measure(job: Job, ranks: int, folder: str) -> list[list[dict[str, Any]]]:
    """What each rank found in each round."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, str(HERE / "checkpoint_rank.py")]
        command += [json.dumps(dataclasses.asdict(job)), place]
        shared = {**os.environ, **ONE_THREAD, **STEADY_MEMORY}
        processes = [
            subprocess.Popen(command, env={**shared, **variables})
            for variables in rank_variables(ranks)
        ]
        try:
            codes = [process.wait(TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"{job}: failed")
        return [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(ranks)]


def measure_stalls(folder: Path, rounds: int, quick: bool) -> list[dict[str, Any]]:
    """The stalls of each round."""
    command = [sys.executable, str(HERE / "checkpoint_stall.py"), str(folder), str(rounds)]
    done = subprocess.run(
        [*command, "quick" if quick else "all"],
        env={**os.environ, **STEADY_MEMORY},
        stdout=subprocess.PIPE,
        timeout=TIMEOUT,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"round"')]


if __name__ == "__main__":
    main()
