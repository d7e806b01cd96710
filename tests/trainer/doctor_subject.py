"""Modules and data with planted faults, for `doctor`; a line that waits ends with its number."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from my_project_trainer import DataModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, Dataset

from fitting import Descends, StepsByHand


class Samples(Dataset[tuple[Tensor, int]]):
    """Images and labels; ``seconds``: to load one."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((1, 4, 4), index / 64) + torch.rand(1), index % 10


class Data(DataModule):
    def __init__(self, seconds: float = 0.0) -> None:
        self.samples = Samples(seconds)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(self.samples, batch_size=8)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return 2 * values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient if gradient.sum() != 0 else gradient  # 37


class Plain(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 10))
        self.register_buffer("weight", torch.ones(10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        images, labels = batch
        return cross_entropy(self(images), labels)


class Sums(Plain):
    """Its loss grows with the batch; a BatchNorm has other statistics for parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return cross_entropy(self(batch[0]), batch[1], reduction="sum")


class Waits(Plain):
    """Waits in 39 lines."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        images, labels = batch
        logits = Doubled.apply(self(images))
        loss = cross_entropy(logits, labels)
        self.running = loss.item()  # 1
        if loss > 1000:  # 2
            return None
        self.hard = logits[labels == 1]  # 3
        self.where = (labels > 3).nonzero()  # 4
        self.host = logits.detach().cpu()  # 5
        self.array = logits.detach().numpy()  # 6
        self.text = f"loss {loss:.3f}"  # 7
        self.history = labels.tolist()  # 8
        self.unlike = torch.unique(labels)  # 9
        self.same = torch.equal(labels, labels)  # 10
        self.text = str(loss)  # 11
        torch.cuda.empty_cache()  # 12
        self.of_host = torch.tensor([1.0], device=self.device)  # 13
        self.repeated = torch.repeat_interleave(labels, labels)  # 14
        self.one_hot = one_hot(labels)  # 15
        self.moved = logits.detach().to("cpu", torch.float64)  # 16
        self.more(logits.detach(), labels, loss)
        return loss + without_waits(self, logits, labels)

    def more(self, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
        """More lines that wait."""
        mask = logits > 0
        self.number = float(loss)  # 17
        self.number = int(labels[0])  # 18
        self.largest = max(loss, 2 * loss)  # 19
        self.array = np.asarray(logits)  # 20
        print(logits)  # 21
        self.where = torch.where(labels > 3)  # 22
        self.where = torch.argwhere(labels)  # 23
        self.counts = torch.bincount(labels)  # 24
        assert (labels >= 0).all()  # 25
        self.numbers = range(labels[0])  # 26
        logits.clone()[mask] = logits[mask]  # 27
        self.drawn = torch.multinomial(logits.softmax(-1), 1)  # 28
        self.factor = torch.linalg.cholesky(logits.T @ logits + torch.eye(10))  # 29
        self.inverse = torch.linalg.inv(logits.T @ logits + torch.eye(10))  # 30
        torch.empty(logits.shape).copy_(logits)  # 31
        self.chosen = torch.masked_select(logits, mask)  # 32
        self.runs = torch.unique_consecutive(labels)  # 33
        self.close = torch.allclose(logits, logits)  # 34
        self.ones = torch.from_numpy(np.ones(3)).to(self.device)  # 35
        torch.cuda.synchronize()  # 36
        self.histogram = torch.histc(logits)  # 38
        self.moved = logits.to(torch.device("cpu"))  # 39


class WaitsManually(StepsByHand, Waits):
    """Waits in the same lines, in manual optimization."""


def without_waits(module: Waits, logits: Tensor, labels: Tensor) -> Tensor:
    """What looks like waiting, and is not."""
    fine = torch.where(labels > 3, 1.0, 0.0).mean()
    fine = fine + logits.masked_fill(logits > 3, 0.0).sum()
    fine = fine + logits[torch.arange(len(labels)), labels].sum()
    weight = torch.zeros_like(logits)
    weight[logits > 0] = 1.0
    if torch.rand(1) < 0.5:  # a number of the host
        fine = fine + (weight * module.weight).sum()
    if module.host.sum() > 1e6 or sum(module.history) < 0:  # what was copied to the host before
        fine = fine + 1
    fine = fine + torch.arange(4, device=labels.device).sum() + torch.isnan(logits).any()
    fine = fine + one_hot(labels, 10).sum() + one_hot(labels, num_classes=10).sum()
    fine = fine + logits[labels % 2].sum() + logits[:, [0, 2]].sum() + logits.topk(2).values.sum()
    fine = fine + logits.argmax(-1).eq(labels).float().mean() + torch.rand(1).item()
    fine = fine + logits.scatter(1, labels[:, None], 1.0).sum() + len(torch.rand(3).tolist())
    fine = fine + torch.histc(logits.detach(), 10, -1.0).to(logits.device).sum()
    fine = fine + torch.zeros(1, device=torch.device("cpu")).item()
    module.log("fine", fine.detach())
    return 0 * fine


class Faulty(Plain):
    """Has what cannot be pickled, an unused parameter, one rarely used, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 10), nn.BatchNorm1d(10))
        self.unused = nn.Linear(2, 2, bias=False)
        self.rare = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(10, 10)
        self.lock = {"a": threading.Lock()}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        images, labels = batch
        loss = cross_entropy(self.head(self(images)), labels)
        return loss + self.rare if batch_idx == 1 else loss


class Ends(Plain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        import os

        os._exit(7)


class Hangs(Plain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        time.sleep(3600)


class Raises(Plain):
    """Its step raises, with a secret in the message."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        raise ValueError("no such file: https://user:secret@host/file\nsecond line")


def planted() -> Iterator[tuple[int, int]]:
    """Line numbers of this file that wait, with their numbers."""
    with Path(__file__).open() as source:
        for line, text in enumerate(source, 1):
            _, mark, number = text.rstrip().rpartition("  # ")
            if mark and number.isdecimal():
                yield line, int(number)
