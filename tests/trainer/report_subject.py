"""Fits with a fault that makes them slow, whose cause a report must find; and a healthy one."""

import time
from pathlib import Path
from typing import Any

import torch
from my_project_trainer.callbacks import Profile
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fitting import Descends, quiet

STEPS = 8


class Model(Descends, lr=0.001):
    """``reads``: a step reads its loss; ``slow_rank``: it takes a fifth of a second more."""

    def __init__(self, width: int = 512, reads: bool = False, slow_rank: int | None = None) -> None:
        super().__init__()
        inner = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*inner, nn.Linear(width, 1))
        self.width, self.reads, self.slow_rank = width, reads, slow_rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.layers(batch[0]).square().mean()
        if self.global_rank == self.slow_rank:
            time.sleep(0.2)
        if self.reads:
            loss.item()  # planted: item
        self.log("loss", loss)
        return loss


def fit(folder: Path, model: Model, batch: int, **options: Any) -> None:
    """Eight steps with batches of a size; three are recorded on each rank."""
    shared = {"max_steps": STEPS, "log_every_n_steps": 100, "callbacks": [Profile(ranks=None)]}
    shared |= {"loggers": ["csv"], "default_root_dir": folder.parent, "run_name": folder.name}
    made = quiet(**shared | options)
    samples = torch.ones(made.world_size * STEPS * batch, model.width)
    made.fit(model, DataLoader(TensorDataset(samples), batch_size=batch))
