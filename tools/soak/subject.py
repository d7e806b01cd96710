"""What is trained: dropout and random noise. Ranks note their processes, and take orders."""

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.launch import files
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

WIDTH = 128
SAMPLES = 96


class Noise(Dataset[Tensor]):
    """Samples that are drawn when they are read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.linspace(0, 1, WIDTH).roll(index) + 0.1 * torch.randn(WIDTH)


class Model(trainer.TrainingModule):
    """About 17,000 weights in two layers.

    Args:
        seconds: that each training step takes at least.
        workers: of the training loader.
    """

    def __init__(self, seconds: float = 0.02, workers: int = 0) -> None:
        super().__init__()
        self.seconds, self.workers = seconds, workers
        self.sequential_module = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, 1)
        )

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        """The first layer by columns, the last by rows."""
        return {"sequential_module.0": ColwiseParallel(), "sequential_module.3": RowwiseParallel()}

    def on_fit_start(self) -> None:
        files.write_atomically(Path(f"process-of-rank-{self.global_rank}"), str(os.getpid()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        order = Path(f"order-to-rank-{self.global_rank}")
        if order.exists():
            name = order.read_text()
            order.unlink()
            ORDERS[name]()
        time.sleep(self.seconds)
        loss = mse_loss(self.sequential_module(batch), batch.mean(1, keepdim=True))
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = mse_loss(self.sequential_module(batch), batch.mean(1, keepdim=True))
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Noise(), batch_size=4, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Noise(), batch_size=8)


def sleeps() -> None:
    time.sleep(10_000)


def holds_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(10_000)


def segfaults() -> None:
    ctypes.string_at(0)


def leaves() -> None:
    os._exit(0)


def allocates() -> None:
    held = []
    while True:
        held.append(b"x" * 10_000_000)


ORDERS = {
    order.__name__: order
    for order in (sleeps, holds_the_interpreter, segfaults, os.abort, leaves, allocates)
}
