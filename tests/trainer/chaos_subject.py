"""What chaos.py trains: dropout, and made-up noise; each rank writes down its process."""

import os
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from my_project_trainer.launch import files
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

WIDTH = 128


class Noise(Dataset[Tensor]):
    """Samples that are drawn when they are read."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Tensor:
        return torch.linspace(0, 1, WIDTH).roll(index) + 0.1 * torch.randn(WIDTH)


class Model(trainer.TrainingModule):
    """Some 16,000 weights in two layers.

    Args:
        seconds: that each training step takes at least.
    """

    def __init__(self, seconds: float = 0.02) -> None:
        super().__init__()
        self.seconds = seconds
        self.network = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, 1)
        )

    def on_fit_start(self) -> None:
        files.write_atomically(Path(f"process-of-rank-{self.global_rank}"), str(os.getpid()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        loss = mse_loss(self.network(batch), batch.mean(1, keepdim=True))
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.network(batch), batch.mean(1, keepdim=True)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Noise(), batch_size=4)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Noise(), batch_size=8)
