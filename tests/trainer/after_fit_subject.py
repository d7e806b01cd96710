"""Fits by an optimizer that draws noise, and uses of the weights after them.

Arguments: ``FOLDER OPTIONS OPTIMIZER``. Each rank writes ``RANK.json``: the error of the fit, the
errors of the uses by name, and the weights that this rank has.
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
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
    parallelize_plan = {  # noqa: RUF012
        "sequential_module.0": ColwiseParallel(),
        "sequential_module.1": RowwiseParallel(),
    }

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.optimizer = optimizer
        self.sequential_module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = torch.rand(1) * 0  # moves the generator of this rank, as dropout does
        return self.scale * self.sequential_module(batch[0]).square().mean() + drawn.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = Noisy if self.optimizer == "Noisy" else torch.optim.SGD
        return kind(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(x))


def error_of(use: Any) -> str:
    try:
        use()
    except UserError as error:
        return str(error)
    return ""


def main(folder: Path, options: dict[str, Any], optimizer: str) -> None:
    module = Model(optimizer)
    quiet = {"loggers": [], "enable_progress_bar": False, "default_root_dir": folder}
    steps = {"max_steps": 4, "global_batch_size": 4, "seed": 7, "run_name": "run"}
    given = {"accelerator": "cpu", **quiet, **steps, **options}
    fit = error_of(lambda: Trainer(**given).fit(module))
    first, bias = (module.sequential_module[index] for index in (0, 1))
    uses = {
        "forward": lambda: module.sequential_module(torch.ones(2, 5)),
        "item": lambda: float(bias.bias.item()),
        "sum": lambda: first.weight.sum() + 0,
        "state_dict": module.state_dict,
        "local": lambda: [getattr(first.weight, "to_local", first.weight.clone)()],
    }
    errors = {name: error_of(use) for name, use in uses.items()}
    given["run_name"] = "again"
    again = error_of(lambda: Trainer(**given).fit(module)) if any(errors.values()) else ""
    parameters = () if any(errors.values()) else module.parameters()
    weights = [number for each in parameters for number in each.flatten().tolist()]
    found = {"fit": fit, "errors": errors, "again": again, "weights": weights}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
