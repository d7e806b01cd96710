"""Modules that `plan` traces: two that fake tensors cannot, and one that never ends a step."""

import sys
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends

WIDTH = 512


class Net(Descends, by=torch.optim.Adam, lr=0.01):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(64, WIDTH)), batch_size=8)


class WithNumpy(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float(batch[0].numpy().mean())


@torch.library.custom_op("plan_subject::mean", mutates_args=())
def custom_mean(x: Tensor) -> Tensor:
    """An operator that says nothing of the shapes of its results."""
    return x.mean()


class WithOperator(Net):
    """Its step uses a custom operator, which has no kernel for fake tensors."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * custom_mean(batch[0])


class Endless(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        threading.Event().wait()
        return super().training_step(batch, batch_idx)


class Exits(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        sys.exit(0)
