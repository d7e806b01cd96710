"""Writes one checkpoint after another until it is killed; started by test_resume.py."""

import sys
from pathlib import Path

import torch
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.checkpoint.writing import Checkpoints


def main(directory: Path) -> None:
    """Say that the first is written, and go on from the newest there is."""
    existing = checkpoint.complete(directory)
    step = int(existing[-1].name.removeprefix("step-")) if existing else 0
    writer = Checkpoints(directory)
    while True:
        step += 1
        writer.save(step, {"step": step, "tensor": torch.full((1_000_000,), float(step))}, {})
        print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
