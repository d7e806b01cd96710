"""A model and data from a file, in which something can be planted."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import DataModule, TrainingModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 24


def write_data(folder: Path) -> None:
    """Write a file that the data module reads, and one that it does not."""
    folder.mkdir()
    for name in ("read.bin", "unread.bin"):
        (folder / name).write_bytes(bytes(range(SAMPLES * 4)))


class Bytes(DataModule):
    """Four bytes of a file are a sample."""

    def __init__(self, folder: str, batch_size: int = 4) -> None:
        self.folder, self.batch_size = folder, batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        values = torch.tensor(list((Path(self.folder) / "read.bin").read_bytes()))
        return DataLoader(TensorDataset(values.view(-1, 4) / 255.0), batch_size=self.batch_size)


class Line(TrainingModule):
    """A layer after dropout; after PREEMPT_IN steps, rank 0 gets SIGUSR1; FAIL_IN: an error."""

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.rate, self.dropout = rate, nn.Dropout(0.1)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.is_global_zero and os.environ.get("PREEMPT_IN") == str(self.global_step):
            os.kill(os.getpid(), signal.SIGUSR1)
        if os.environ.get("FAIL_IN") == str(self.global_step):
            raise ValueError("planted")
        loss = self.layer(self.dropout(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.rate)
