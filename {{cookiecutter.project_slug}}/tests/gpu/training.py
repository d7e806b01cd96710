"""Fits of a few steps in this process, and how far their results are from one another."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import my_project_trainer as trainer
from my_project_trainer.checkpoint import reading as checkpoint

from . import device

STEPS = 5
STOP = 3


@dataclass(frozen=True)
class Trained:
    """A finished fit: weights on the CPU, the losses of its steps, and its run directory."""

    weights: Mapping[str, Tensor]
    losses: Tensor
    directory: Path


def train(folder: Path, name: str, module: Any, **options: Any) -> Trained:
    """Train for :data:`STEPS` steps on the device of the checks.

    Args:
        folder: of all runs.
        name: of this run.
        module: what is trained.
        options: of the trainer, in place of those that are set here.
    """
    run = trainer.Trainer(
        **{
            "accelerator": device.ACCELERATOR,
            "devices": 1,
            "max_steps": STEPS,
            # Compute in float32 what is float32: a reference on the CPU knows no TF32.
            "matmul_precision": "highest",
            "log_every_n_steps": 1,
            "loggers": ["csv"],
            "enable_progress_bar": False,
            "default_root_dir": folder,
            "run_name": name,
            **options,
        }
    )
    run.fit(module)
    state = module.state_dict()
    if run._plan.strategy.limits.shards_parameters:
        state = checkpoint.Checkpoint(checkpoint.resolve(run.run_directory)).state()["model"]
    weights = {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
    return Trained(weights, losses(run.run_directory / "metrics.csv"), run.run_directory)


def losses(path: Path) -> Tensor:
    if not path.exists():  # nothing was logged
        return torch.empty(0)
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "loss"]
    return torch.tensor([float(row["value"]) for row in rows], dtype=torch.float64)


def distance(one: Trained, other: Trained) -> float:
    """The largest difference of a weight, or of a loss of a step that both have logged."""
    assert one.weights.keys() == other.weights.keys()
    distances = [_distance(weight, other.weights[key]) for key, weight in one.weights.items()]
    return max(*distances, _distance(*_losses_of_both(one, other)))


def _distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())


def is_same(one: Trained, other: Trained) -> bool:
    """Whether all weights, and the losses of steps that both have, are equal to the last bit."""
    return (
        one.weights.keys() == other.weights.keys()
        and all(torch.equal(weight, other.weights[key]) for key, weight in one.weights.items())
        and torch.equal(*_losses_of_both(one, other))
    )


def _losses_of_both(one: Trained, other: Trained) -> tuple[Tensor, Tensor]:
    """A run that was resumed in another directory has logged the last steps alone."""
    steps = min(len(one.losses), len(other.losses))
    assert steps in (STEPS, STEPS - STOP)
    return one.losses[-steps:], other.losses[-steps:]
