"""Fits by an optimizer that draws noise. Arguments: ``FOLDER OPTIONS``.

Each rank writes ``RANK.json``: the error of the fit, and the weights that this rank has.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from my_project_trainer import Trainer, TrainingModule
from my_project_trainer.errors import UserError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Noisy(torch.optim.Optimizer):
    """Steps by its own random numbers."""

    is_elementwise = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * (each.grad + torch.randn_like(each)))
                    each.sub_(0.01 * random.random() + 0.01 * float(np.random.rand()))


class Model(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.sequential_module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = torch.rand(1) * 0  # moves the generator of this rank, as dropout does
        return self.scale * self.sequential_module(batch[0]).square().mean() + drawn.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Noisy(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(x))


def main(folder: Path, options: dict[str, Any]) -> None:
    module, error = Model(), ""
    quiet = {"loggers": [], "enable_progress_bar": False, "default_root_dir": folder}
    steps = {"max_steps": 4, "global_batch_size": 4, "seed": 7, "run_name": "run"}
    try:
        Trainer(**{"accelerator": "cpu", **quiet, **steps, **options}).fit(module)
    except UserError as raised:
        error = str(raised)
    parameters = () if error else module.parameters()
    weights = [number for each in parameters for number in each.flatten().tolist()]
    found = {"fit": error, "weights": weights}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
