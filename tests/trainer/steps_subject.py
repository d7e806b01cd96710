"""A model that writes down what its rank really reads; named by class path in the tests."""

import json
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 37


class Reads(trainer.TrainingModule):
    """Appends a line for each training step to a file of its rank.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.linear = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        line = [self.current_epoch, self.global_step, x.flatten().tolist()]
        with (self.folder / f"reads-{self.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return self.linear(x / SAMPLES).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)), batch_size=4)
