"""Trains once through, then once from every step's checkpoint; started by test_resume.py.

``python -m resume_worker PROCESSES LOADER_WORKERS FOLDER`` prints a line of JSON a step.
"""

import faulthandler
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import numpy as np
import torch
from my_project_trainer.checkpoint.reading import Checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from fitting import quiet


class Augmented(Dataset[tuple[Tensor, int]]):
    """Noise from torch, NumPy and Python on each sample, different each time."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.linspace(0, 1, 8).roll(index)
        return x + torch.randn(8) + np.random.rand() + random.random(), index % 3


class Model(trainer.TrainingModule):
    """Dropout, a shuffled loader, schedulers, an epoch's mean and an optimizer with state."""

    def __init__(self, loader_workers: int) -> None:
        super().__init__()
        self.loader_workers = loader_workers
        self.network = nn.Sequential(
            nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        loss = cross_entropy(self.network(x), labels)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, labels = batch
        torch.rand(3)  # a validation that draws must not change the training that follows
        self.log("val_loss", cross_entropy(self.network(x), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        # No validation loss meets its threshold: the rate falls after each.
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return [optimizer], [step, {"scheduler": plateau, "monitor": "val_loss"}]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Augmented(), batch_size=4, num_workers=self.loader_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Augmented(), batch_size=4)


def main(processes: int, loader_workers: int, folder: Path) -> None:
    """Compare every resumed run with the uninterrupted one."""
    run, steps = train(processes, loader_workers, folder, "whole", keep_checkpoints=100)
    weights, metrics = result(run)
    if is_main(run):
        save_file(weights, folder / "weights.safetensors")
        (folder / "metrics.csv").write_text("\n".join(metrics))
    checkpoints = sorted((folder / "whole" / "checkpoints").iterdir())
    assert len(checkpoints) == steps
    for step, checkpoint in enumerate(checkpoints[:-1], start=1):
        resume = {"resume": str(checkpoint), "run_name": f"from-{step}"}
        again, _ = train(processes, loader_workers, folder, **resume)
        resumed, logged = result(again)
        if is_main(again):
            same = all(torch.equal(weights[key], resumed[key]) for key in weights)
            told = {"step": step, "weights": same, "metrics": logged == tail(run, checkpoint)}
            print(json.dumps(told))


def train(
    processes: int, loader_workers: int, folder: Path, run_name: str, **extra: Any
) -> tuple[Any, int]:
    """A run of two epochs; the steps that it made in all."""
    shared = {"max_epochs": 2, "log_every_n_steps": 1, "checkpoint_every_n_steps": 1}
    shared |= {"loggers": ["csv"], "default_root_dir": folder, "run_name": run_name}
    run: Any = quiet(devices=processes, **shared, **extra)
    model = Model(loader_workers)
    run.fit(model)
    run.trained = {key: value.clone() for key, value in model.state_dict().items()}
    return run, run.global_step


def result(run: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Final weights, and the rows of the log."""
    return run.trained, (run.run_directory / "metrics.csv").read_text().splitlines()[1:]


def tail(run: Any, checkpoint: Path) -> list[str]:
    """The rows of an uninterrupted log that were written after a checkpoint."""
    written = Checkpoint(checkpoint).state()["logs"]["csv"]
    return (run.run_directory / "metrics.csv").read_bytes()[written:].decode().splitlines()


def is_main(run: Any) -> bool:
    return run.global_rank == 0


if __name__ == "__main__":
    # A rank first: that its launcher waits is known.
    faulthandler.dump_traceback_later(600 if "RANK" in os.environ else 660, exit=True)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
