"""Trains the subject in every way of the matrix under one strategy; started by the tests.

``python -m tests.conformance.worker STRATEGY PROCESSES FOLDER`` writes a file a property.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..project import trainer
from .faults import FAULTS, FAULTY
from .matrix import MATRIX, PROPERTIES, Property
from .subject import GLOBAL_BATCH, Subject

STOP = 4  # in the middle of the first epoch


def main(strategy: str, processes: int, folder: Path) -> None:
    """Train in every way, and once with a stop and a resume."""
    for name, fault in FAULTS.items():
        trainer.register(name, fault)
    refused = MATRIX[strategy].refused if strategy in MATRIX else {}
    wanted = FAULTY if strategy in FAULTS else [name for name in PROPERTIES if name not in refused]
    for name in wanted:
        train(name, PROPERTIES[name], strategy, processes, folder)
        if strategy not in FAULTS:
            stop = {"max_steps": STOP, "checkpoint_every_n_steps": 1}
            stopped = train(
                f"{name}-stopped", PROPERTIES[name], strategy, processes, folder, **stop
            )
            resume = {"resume": str(stopped)}
            train(f"{name}-resumed", PROPERTIES[name], strategy, processes, folder, **resume)


def train(
    name: str, way: Property, strategy: str, processes: int, folder: Path, **extra: Any
) -> Path:
    """Train once, into the run's directory; the main process writes weights and losses."""
    run = trainer.Trainer(
        **{
            "accelerator": "cpu",
            "devices": processes,
            "strategy": strategy,
            "max_epochs": 2,
            "global_batch_size": GLOBAL_BATCH,
            "log_every_n_steps": 1,
            "loggers": ["csv"],
            "enable_progress_bar": False,
            "default_root_dir": folder / "runs",
            "run_name": name.replace(" ", "-").removesuffix("-resumed").removesuffix("-stopped")
            + ("" if name.count("-") == 0 else "-interrupted"),
            **way.trainer,
            **extra,
        }
    )
    subject = Subject(**way.subject)
    run.fit(subject)
    assert run.world_size == processes
    if run.global_rank == 0:
        weights = {key: value.contiguous() for key, value in subject.state_dict().items()}
        save_file(weights | {"losses": _losses(run.run_directory)}, folder / f"{name}.safetensors")
    return run.run_directory


def _losses(directory: Path) -> torch.Tensor:
    with (directory / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "loss"]
    return torch.tensor([float(row["value"]) for row in rows], dtype=torch.float64)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
