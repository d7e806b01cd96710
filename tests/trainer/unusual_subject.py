"""Modules with unusual parameters, optimizers and losses.

``python -m unusual_subject FOLDER SUBJECT STRATEGY DEVICES``
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, StepsByHand, fit

WIDTH = 4


class Base(Descends, by=torch.optim.Adam, lr=0.01):
    """A layer, and what a subject adds to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the trainer's
        self.layer = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def train_dataloader(self) -> Any:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(x), batch_size=4)


class Complex(Base):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.view_as_complex(torch.arange(8.0).view(4, 2) / 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.factor).abs()


class ComplexManual(StepsByHand, Complex):
    """Complex numbers with manual optimization."""


class Strided(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.arange(12.0).view(3, WIDTH) / 12).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.weight


class Scalar(Base):
    """A weight without dimensions, which each rank has created with another value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5 + int(os.environ.get("RANK", "0"))))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class ScalarManual(StepsByHand, Scalar):
    """The same with manual optimization, under which fsdp shards each child."""


class Empty(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.weight.sum()


class Mixed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x).double())


class Penalty(Base):
    """A gradient penalty: the gradient of a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).tanh().sum(), x, create_graph=True)
        return self(x).square().mean() + gradient.norm(dim=1).square().mean()


class RoutedRaw(Base):
    """Each rank uses a parameter of its own, of no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.ones(WIDTH, 3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ (self.second if self.global_rank else self.first)


if __name__ == "__main__":
    folder, subject, strategy, devices = sys.argv[1:]
    shared = {"devices": int(devices), "strategy": strategy, "max_steps": 3, "global_batch_size": 8}
    fit(globals()[subject](), Path(folder), **shared)
