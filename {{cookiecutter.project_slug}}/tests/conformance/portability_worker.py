"""Saves a run's first steps under one strategy, or goes on under it from what others have saved.

Started by the tests: ``python -m tests.conformance.portability_worker save FOLDER STRATEGY`` writes
``FOLDER/runs/STRATEGY``, and ``… load FOLDER STRATEGY SOURCE …`` a file for each of these sources.
"""

import sys
from pathlib import Path

import torch

from .matrix import MATRIX, PORTABLE
from .worker import STOP, train

SUBJECT = {"optimizer": "adam"}


def save(folder: Path, name: str) -> None:
    devices = PORTABLE[name].saves.devices
    options = {**_chosen(name), "devices": devices, "run_name": name, "max_steps": STOP}
    train(folder / f"{name}-stopped.safetensors", SUBJECT, options)


def load(folder: Path, name: str, *sources: str) -> None:
    """Train to the end from the checkpoints of other strategies."""
    options = {**_chosen(name), "devices": PORTABLE[name].loads.devices}
    for source in sources:
        resume = {"run_name": f"{source}-to-{name}", "resume": str(folder / "runs" / source)}
        train(folder / f"{source} to {name}.safetensors", SUBJECT, options | resume)


def _chosen(name: str) -> dict[str, object]:
    return {"strategy": name, "strategy_options": dict(MATRIX[name].options)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, folder, *names = sys.argv[1:]
    {"save": save, "load": load}[command](Path(folder), *names)
