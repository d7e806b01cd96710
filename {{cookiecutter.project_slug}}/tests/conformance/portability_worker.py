"""Saves a run's first steps under one strategy, or goes on under it from what others have saved.

Started by the tests: ``python -m tests.conformance.portability_worker save FOLDER STRATEGY`` writes
``FOLDER/runs/STRATEGY``, and ``… load FOLDER STRATEGY`` a file for each of these runs.
"""

import sys
from pathlib import Path

import torch

from .matrix import MATRIX, PORTABLE
from .worker import STOP, train

SUBJECT = {"optimizer": "adam"}


def save(folder: Path, name: str) -> None:
    """Train a few steps and save."""
    devices = PORTABLE[name].saves.devices
    options = {**_chosen(name), "devices": devices, "run_name": name, "max_steps": STOP}
    train(folder / f"{name}-stopped.safetensors", SUBJECT, options)


def load(folder: Path, name: str) -> None:
    """Train to the end from each strategy's checkpoint, and from none."""
    options = {**_chosen(name), "devices": PORTABLE[name].loads.devices}
    for source in sorted((folder / "runs").iterdir()):
        if source.name in PORTABLE:
            result = folder / f"{source.name} to {name}.safetensors"
            run_name = f"{source.name}-to-{name}"
            train(result, SUBJECT, {**options, "run_name": run_name, "resume": str(source)})


def _chosen(name: str) -> dict[str, object]:
    return {"strategy": name, "strategy_options": dict(MATRIX[name].options)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, folder, name = sys.argv[1:]
    {"save": save, "load": load}[command](Path(folder), name)
