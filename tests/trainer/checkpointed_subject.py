"""What is trained with activation checkpointing and without."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import fitting

FEATURES = 8


class Block(nn.Module):
    """BatchNorm, dropout and a buffer that counts; called by keyword."""

    forwards = 0

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 4 * FEATURES)
        self.norm = nn.BatchNorm1d(4 * FEATURES, momentum=momentum)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(4 * FEATURES, FEATURES)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        Block.forwards += 1
        self.calls += 1
        return x + scale * self.second(self.dropout(self.norm(self.first(x))).tanh())


class Network(nn.Module):
    """Blocks, one of them called twice, and norms of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(momentum=None), Block()])
        self.images = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Tanh())
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.new_ones(1) / 2
        for layer in (*self.layers, self.layers[0]):
            x = layer(x, scale=scale)
        return self.head(self.images(x.view(len(x), 2, -1)).flatten(1))


class Model(fitting.Descends, lr=0.05, momentum=0.9):
    def __init__(self) -> None:
        super().__init__()
        Block.forwards = 0
        torch.manual_seed(0)
        self.network = Network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.network(x), y)
        self.log("forwards", float(Block.forwards), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        before = Block.forwards
        self.network(batch[0])
        self.log("forwards_in_validation", float(Block.forwards - before))

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(48, FEATURES, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)

    val_dataloader = train_dataloader
