"""Measures what checksums cost when a checkpoint is saved: the same save with and without them.

PYTHONPATH=PROJECT/src python benchmarks/checkpoints.py           100 million parameters, 7 rounds
PYTHONPATH=PROJECT/src python benchmarks/checkpoints.py --quick   a smoke run

A save is that of float32 weights and both moments of Adam, synchronous, onto the disk of --folder.
Rounds alternate, and a ratio is that of one round: a disk's speed changes over minutes. It prints
the table of docs/reliability.md of a project.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from my_project_trainer.checkpoint import tensor_files
from my_project_trainer.checkpoint.reading import Checkpoint, resolve
from my_project_trainer.checkpoint.writing import Checkpoints

State = dict[str, dict[str, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of a small model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary one by default")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.parameters = 1, 1_000_000

    state = made_up(options.parameters)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        save(Path(folder), state)  # imports, and the first pages of the disk's cache
        found = [one_round(Path(folder), state, number) for number in range(options.rounds)]
    columns = list(zip(*found, strict=True))
    without, with_checksums, checked = columns
    ratios = [checksum / other for checksum, other in zip(with_checksums, without, strict=True)]
    print(f"{options.parameters / 1e6:g} million parameters, {options.rounds} rounds")
    print("| | median | min … max |")
    print("|---|---|---|")
    for name, values in (
        ("save without checksums, s", without),
        ("save with checksums, s", with_checksums),
        ("ratio within a round", ratios),
        ("check all checksums, s", checked),
    ):
        spread = f"{min(values):.3f} … {max(values):.3f}"
        print(f"| {name} | {statistics.median(values):.3f} | {spread} |")


def made_up(parameters: int) -> State:
    """Weights and moments in 100 tensors each."""
    each = parameters // 100
    return {
        part: {f"layer.{index}": torch.randn(each) for index in range(100)}
        for part in ("model", "exp_avg", "exp_avg_sq")
    }


def one_round(folder: Path, state: State, number: int) -> tuple[float, float, float]:
    """Seconds without checksums, with them, and of a check."""
    seconds: dict[bool, float] = {}
    for checksums in (False, True) if number % 2 else (True, False):
        with contextlib.nullcontext() if checksums else _no_checksums():
            seconds[checksums] = save(folder, state)
    save(folder, state)
    started = time.perf_counter()
    Checkpoint(resolve(folder)).check_contents()
    return seconds[False], seconds[True], time.perf_counter() - started


@contextlib.contextmanager
def _no_checksums() -> Iterator[None]:
    with mock.patch.object(tensor_files, "zlib", crc32=lambda piece, crc32: 0):
        yield


def save(folder: Path, state: State) -> float:
    """Seconds of a save, which replaces the one before."""
    writer = Checkpoints(folder)
    started = time.perf_counter()
    writer.save(1, state, {})
    seconds = time.perf_counter() - started
    writer.close()
    return seconds


if __name__ == "__main__":
    main()
