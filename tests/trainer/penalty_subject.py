"""A gradient penalty under several strategies: the loss has the gradient of a gradient.

``python -m penalty_subject FOLDER DEVICES NAME …`` fits once for each, and prints its error.
"""

import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from cut_subject import tell_end
from fitting import quiet

RUNS: dict[str, dict[str, Any]] = {
    "alone": {},
    "sync_batchnorm": {"strategy": "ddp", "sync_batchnorm": True},
    "tensor": {"strategy": "tensor_parallel"},
    "tensor, of another layer": {"strategy": "tensor_parallel"},
    "tensor, none": {"strategy": "tensor_parallel"},
}


class Critic(trainer.TrainingModule):
    parallelize_plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        hidden = self.first(x).tanh()
        if self.name in ("alone", "sync_batchnorm"):
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        y = self.down(self.up(hidden).tanh())
        loss = y.square().mean()
        if self.name.endswith("none"):
            return loss
        penalized = hidden if "another" in self.name else y
        (slope,) = torch.autograd.grad(penalized.square().sum(), x, create_graph=True)
        return loss + slope.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        x = torch.randn(8, 4, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x))


def main(folder: Path, devices: int, names: list[str]) -> None:
    for name in names:
        module = Critic(name)
        where = {"default_root_dir": folder, "run_name": name.replace(", ", "-").replace(" ", "-")}
        run = quiet(devices=devices, global_batch_size=4, max_epochs=2, **where, **RUNS[name])
        tell_end(name, run, module)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
