"""Measures the memory of a rank under every strategy that divides it, and writes docs/memory.md.

PYTHONPATH=PROJECT/src python benchmarks/memory.py           all of it: three rounds, half an hour
PYTHONPATH=PROJECT/src python benchmarks/memory.py --quick   a smoke run of a minute; writes nothing

It runs in the environment of a rendered project, which has the engines: `make bench-memory`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from my_project_trainer import ConfigurationError, Trainer
from my_project_trainer.strategies import names

import memory_report
from child import ONE_THREAD, rank_variables
from folders import writable
from memory_entries import ENTRIES, Entry
from memory_report import Found
from memory_subject import QUICK, SIZE

HERE = Path(__file__).parent
TIMEOUT = 300  # seconds; a measurement takes about twenty
QUICKLY = ("ddp", "ddp_zero1")

# Every tensor of more than 64 KiB is mapped alone and given back when it is freed, so that what is
# resident is what is alive. By default glibc moves this threshold up as it goes.
STEADY_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 10),
    "MALLOC_ARENA_MAX": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of a tiny model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a measurement")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=[entry.name for entry in ENTRIES])
    parser.add_argument("--out", type=writable, default=HERE.parent / "docs", help="of the report")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.ranks, options.steps = 1, [2], 2

    wanted = options.only or (QUICKLY if options.quick else [entry.name for entry in ENTRIES])
    entries, left_out = available([entry for entry in ENTRIES if entry.name in wanted])
    print(*left_out, sep="\n", file=sys.stderr)
    size = QUICK if options.quick else SIZE
    found: Found = {ranks: {} for ranks in options.ranks}
    for number in range(options.rounds):
        # Every other round runs backwards, so that a machine that slows down favors nobody.
        for entry in entries[::-1] if number % 2 else entries:
            for ranks in options.ranks:
                job = {**entry.job, **dataclasses.asdict(size), "steps": options.steps}
                result = measure(entry.name, job, ranks)
                line = ", ".join(f"{key} {value:.2f}" for key, value in result.items())
                print(f"{number + 1}: {entry.name}, {ranks} ranks: {line}", file=sys.stderr)
                found[ranks].setdefault(entry.name, []).append(result)
    check(found)
    text = memory_report.markdown(found, entries, size, left_out)
    print(text)
    print(*memory_report.verdict(found, entries), sep="\n")
    if not options.quick:
        (options.out / "memory.md").write_text(text)
        (options.out / "memory.svg").write_text(memory_report.plot(found, entries))


def available(entries: list[Entry]) -> tuple[list[Entry], list[str]]:
    """Those that can run here, and a line for each that cannot."""
    found, lines = [], []
    for entry in entries:
        try:
            if entry.arguments["strategy"] not in names():
                raise ConfigurationError("the trainer has no such strategy")
            # Its check names a package that is missing, or an option that is not known.
            Trainer(accelerator="cpu", devices=2, max_steps=1, **entry.arguments)
        except ConfigurationError as error:
            lines.append(f"{entry.name} is left out: {error}")
        else:
            found.append(entry)
    return found, lines


def measure(name: str, job: dict[str, Any], ranks: int) -> dict[str, float]:
    """Train on `ranks` processes; of what they found, the largest memory and the mean time."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        folder = Path(place)
        processes = []
        try:
            for rank, variables in enumerate(rank_variables(ranks)):
                with (folder / f"{rank}.log").open("w") as log:
                    command = [sys.executable, str(HERE / "memory_one.py"), json.dumps(job)]
                    processes.append(
                        subprocess.Popen(
                            [*command, str(folder / f"{rank}.json")],
                            env={**os.environ, **ONE_THREAD, **STEADY_MEMORY, **variables},
                            cwd=folder,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                        )
                    )
            results = _results(name, processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    found = {key: max(result[key] for result in results) for key in results[0]}
    for key in ("step_s", "loss"):
        found[key] = sum(result[key] for result in results) / ranks
    return found


def _results(
    name: str, processes: list[subprocess.Popen[bytes]], folder: Path
) -> list[dict[str, float]]:
    deadline = time.monotonic() + TIMEOUT
    paths = [folder / f"{rank}.json" for rank in range(len(processes))]
    while any(process.poll() is None for process in processes):
        failed = any(process.returncode for process in processes)
        if time.monotonic() > deadline or (failed and not all(path.exists() for path in paths)):
            break
        time.sleep(0.1)
    if not all(path.exists() for path in paths):
        logs = [*folder.glob("*.log"), *folder.glob("runs/*/logs/*.log")]
        words = "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)
        raise SystemExit(f"{name}, {len(processes)} ranks: failed or hangs; last words:\n{words}")
    return [json.loads(path.read_text()) for path in paths]


def check(found: Found) -> None:
    """All must have come to ddp's loss, or they did not do the same work."""
    for ranks, entries in found.items():
        for name, results in entries.items():
            for mine, ddp in zip(results, entries.get("ddp", []), strict=False):
                if abs(mine["loss"] - ddp["loss"]) > 1e-3 * ddp["loss"]:
                    raise SystemExit(
                        f"{name}, {ranks} ranks: loss {mine['loss']:.4f}, not {ddp['loss']:.4f}"
                    )


if __name__ == "__main__":
    main()
