"""Writes one checkpoint after another until it is killed; started by test_resume.py.

``python -m checkpoint_writer FOLDER [async]``: the latter copies a tensor in the background.
"""

import sys
from pathlib import Path

import torch
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.checkpoint.writing import Checkpoints


def main(directory: Path, asynchronous: bool) -> None:
    """Say that one is complete, and go on from the newest there is."""
    existing = run_directory.complete(directory)
    step = int(existing[-1].name.removeprefix("step-")) if existing else 0
    writer = Checkpoints(directory, asynchronous=asynchronous)
    while True:
        step += 1
        tensors = [torch.full((1_000_000,), float(step)) for _ in range(2)]
        writer.save(step, {"step": step, "tensor": tensors[0], "optimizers": [tensors[1]]}, {})
        if run_directory.complete(directory):
            print(step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "async" in sys.argv[2:])
