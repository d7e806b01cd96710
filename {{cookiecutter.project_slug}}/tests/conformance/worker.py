"""Trains the subject in every way of the matrix under one strategy; started by the tests.

``python -m tests.conformance.worker FOLDER ROW LAUNCH WAY …`` writes a file for each way, and
``… FOLDER reference PIECES READERS WAY …`` what one process computes in their stead.
"""

import csv
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import my_project_trainer as trainer
from my_project_trainer import strategies
from my_project_trainer.checkpoint import reading as checkpoint

from .matrix import MATRIX
from .rows import PROPERTIES, Launch, Row
from .subject import GLOBAL_BATCH, make

STOP = 3  # in the middle of the first epoch, and of two batches that are accumulated


def train_row(folder: Path, row: Row, name: str, launch: Launch, ways: Sequence[str]) -> None:
    """Train in some ways, and once with a stop and a resume."""
    chosen = {"strategy": row.strategy or name, "devices": launch.devices}
    for way in ways:
        one = PROPERTIES[way]
        name_of_run = way.replace(", ", "-").replace(" ", "-")
        known = strategies.options_of(strategies.find(chosen["strategy"]).cls)
        also = {option: value for option, value in one.options.items() if option in known}
        overrides = {"strategy_options": {**row.options, **also}, "run_name": name_of_run}
        options = {**chosen, **one.trainer, **overrides}
        train(folder / f"{way}.safetensors", one.subject, options)
        options["run_name"] += "-interrupted"
        stop = {"max_steps": STOP, "checkpoint_every_n_steps": 1}
        stopped = train(folder / f"{way}-stopped.safetensors", one.subject, options | stop)
        resume = {"resume": str(stopped)}
        train(folder / f"{way}-resumed.safetensors", one.subject, options | resume)


def train_references(folder: Path, pieces: int, readers: int, ways: Sequence[str]) -> None:
    for way in ways:
        one = PROPERTIES[way]
        subject = {**(one.alone or one.subject), "pieces": pieces, "readers": readers}
        name_of_run = way.replace(", ", "-").replace(" ", "-")
        options = {**one.trainer, **one.trainer_alone, "run_name": name_of_run}
        train(folder / f"{way}.safetensors", subject, {"devices": 1, **options})


def train(result: Path, subject: Mapping[str, Any], options: Mapping[str, Any]) -> Path:
    """Train once; the main process writes weights, losses and the state of callbacks.

    Returns:
        the run's directory.
    """
    run = trainer.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "global_batch_size": GLOBAL_BATCH,
            "log_every_n_steps": 1,
            "loggers": ["csv"],
            "enable_progress_bar": False,
            "default_root_dir": result.parent / "runs",
            **options,
        }
    )
    module = make(**subject)
    run.fit(module)
    if run.global_rank == 0:
        tensors = _weights(module, run) | {"losses": _losses(run.run_directory)}
        if "callbacks" in options:
            state = checkpoint.Checkpoint(checkpoint.resolve(run.run_directory)).state()
            tensors |= _tensors("callbacks", state["callbacks"])
        save_file(tensors, result)
    return run.run_directory


def _weights(module: Any, run: Any) -> dict[str, torch.Tensor]:
    """The full tensors, whether the strategy shards them or not."""
    state = module.state_dict()
    if run._plan.strategy.limits.shards_parameters:
        state = checkpoint.Checkpoint(checkpoint.resolve(run.run_directory)).state()["model"]
    return {key: value.cpu().contiguous() for key, value in state.items()}


def _tensors(name: str, state: Any) -> dict[str, torch.Tensor]:
    """The tensors and numbers of a callback's state, by their path in it."""
    if isinstance(state, Mapping):
        per_key = [_tensors(f"{name}.{key}", value) for key, value in state.items()]
        return {key: value for tensors in per_key for key, value in tensors.items()}
    if isinstance(state, torch.Tensor):
        return {name: state.contiguous()}
    return {name: torch.tensor(state, dtype=torch.float64)}


def _losses(directory: Path) -> torch.Tensor:
    with (directory / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "loss"]
    return torch.tensor([float(row["value"]) for row in rows], dtype=torch.float64)


def main(folder: Path, name: str, *rest: str) -> None:
    """Train a row's launch by its number, or references for pieces and readers."""
    if name == "reference":
        train_references(folder, int(rest[0]), int(rest[1]), rest[2:])
    else:
        row = MATRIX[name]
        train_row(folder, row, name, row.launches[int(rest[0])], rest[1:])


def check_capability() -> None:
    """Check that torch's kernels are those of the CPU that ATEN_CPU_CAPABILITY asks for."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    assert capability == os.environ.get("ATEN_CPU_CAPABILITY", capability), capability
    print(f"CPU capability: {capability}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_capability()
    main(Path(sys.argv[1]), *sys.argv[2:])
