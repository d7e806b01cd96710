"""Trains models with FairScale's Pipe and without it, for test_fairscale_pipe.py."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from my_project_trainer import Trainer, TrainingModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

BATCH, CHUNKS = 12, 3


class Net(TrainingModule):
    """Layers before and in the sequential module.

    Args:
        middle: the layer in the middle.
        manual: optimize manually, in every second batch.
    """

    def __init__(self, middle: nn.Module | None = None, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        torch.manual_seed(0)
        before = (nn.Linear(6, 16), nn.Tanh())
        self.embed = nn.Linear(6, 6)
        after = (nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.sequential_module = nn.Sequential(*before, middle or nn.Identity(), *after)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = mse_loss(self.sequential_module(self.embed(x)), y)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", mse_loss(self.sequential_module(self.embed(x)), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(4 * BATCH, 6, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x[:, :3] * x[:, 3:]), batch_size=BATCH)

    val_dataloader = train_dataloader


class Deferred(nn.BatchNorm1d):
    """What Pipe's BatchNorm computes: it normalizes micro-batches, and counts whole batches."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(x.mean(0), self.momentum)
            self.running_var.lerp_(x.var(0, correction=0), self.momentum)
        parts = [
            nn.functional.batch_norm(part, None, None, self.weight, self.bias, training=True)
            for part in x.chunk(CHUNKS)
        ]
        return torch.cat(parts)


def fit(root: Path, model: Net, strategy_options: Any = None, **options: Any) -> Trainer:
    """Train two epochs; with options of the strategy, by Pipe."""
    by_pipe = {"strategy": "sequential_fairscale", "strategy_options": strategy_options}
    given = {"accelerator": "cpu", "loggers": [], "enable_progress_bar": False, "max_epochs": 2}
    given |= {"devices": 2, **by_pipe} if strategy_options is not None else {"devices": 1}
    trainer = Trainer(default_root_dir=root, **(given | options))
    trainer.fit(model)
    return trainer


def difference(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of a parameter or buffer, whose names and order are the same."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def compared(root: Path) -> dict[str, Any]:
    """Differences from training without Pipe."""
    found: dict[str, Any] = {}
    alone = Net()
    fit(root, alone)
    for name, options in {
        "default": {},
        "except last": {"checkpoint": "except_last"},
        "balance": {"balance": [4, 2]},
        "time": {"balance": "time", "checkpoint": "never"},
        "odd": {"microbatches": 5, "checkpoint": "always"},
    }.items():
        model = Net()
        fit(root, model, options)
        found[name] = difference(alone, model)
    model = Net()
    trainer = fit(root, model, {}, devices=3)
    found["three"] = difference(alone, model)
    metrics = trainer.validate(model)
    reference = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    found["validation"] = abs(metrics["val_loss"] - reference.validate(alone)["val_loss"])
    manual, by_hand = Net(manual=True), Net(manual=True)
    fit(root, manual)
    fit(root, by_hand, {"microbatches": CHUNKS})
    found["manual"] = difference(manual, by_hand)
    for checkpoint in ("never", "always"):
        normed, deferred = Net(nn.BatchNorm1d(16)), Net(Deferred(16))
        fit(root, deferred)
        trainer = fit(root, normed, {"microbatches": CHUNKS, "checkpoint": checkpoint})
        found[f"norm, {checkpoint}"] = difference(deferred, normed)
        found["kind"] = type(normed.sequential_module[2]).__name__
    found["own forward"] = "forward" in vars(normed.sequential_module)
    found["threads"] = sum(each.daemon for each in threading.enumerate())
    return found | {"resumed": resumed(root)}


def resumed(root: Path) -> float:
    """Difference of a run that stops in the middle of an epoch and resumes, with dropout."""
    options = {"microbatches": CHUNKS, "checkpoint": "always", "balance": [3, 3]}
    whole, first, second = (Net(nn.Dropout(0.3)) for _ in range(3))
    fit(root, whole, options, max_epochs=3, run_name="whole")
    fit(root, first, options, max_epochs=3, max_steps=6, run_name="part")
    fit(root, second, options, max_epochs=3, resume=str(root / "part"))
    return difference(whole, second)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(compared(Path(sys.argv[1]))))
