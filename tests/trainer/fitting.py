"""What tests of fits share: a quiet trainer, and what a run has saved and logged."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.checkpoint import Checkpoint, resolve
from tests.conformance.rows import ROUNDING
from torch import Tensor


def quiet(**options: Any) -> trainer.Trainer:
    """One that trains in this process; it shows and logs nothing unless it is told to."""
    shared = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "loggers": []}
    return trainer.Trainer(**shared | options)


def fit(module: Any, folder: Path, **options: Any) -> Any:
    """Train in this process; the trainer, whose run is named ``run``."""
    made = quiet(**{"default_root_dir": folder, "run_name": "run"} | options)
    made.fit(module)
    return made


def saved(run_directory: Any) -> dict[str, Tensor]:
    """The weights in a run's newest checkpoint, or in a checkpoint."""
    model: dict[str, Tensor] = Checkpoint(resolve(run_directory)).state()["model"]
    return model


def logged(run_directory: Any, name: str) -> list[float]:
    """All values of a name in a run's log, in order."""
    with (run_directory / "metrics.csv").open(newline="") as file:
        return [float(row["value"]) for row in csv.DictReader(file) if row["name"] == name]


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Two models are the same but for rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=ROUNDING, rtol=0, msg=name)
