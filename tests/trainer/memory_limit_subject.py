"""A model of many parameters, and a bound to the memory of the process that makes it."""

import os
import resource
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LIMIT = "TEST_MEMORY_LIMIT_MIB"
"""Variable: how much more memory a process may take, from when it makes the model."""
WIDTH = 2048
LAYERS = 12
SAMPLES = 64


def limit_memory() -> None:
    """Let this process' own memory grow by so much at most; the kernel refuses what is beyond."""
    if LIMIT not in os.environ:
        return
    status = Path("/proc/self/status").read_text().split()
    now = int(status[status.index("VmData:") + 1]) * 1024
    limit = now + int(os.environ[LIMIT]) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


class Wide(trainer.TrainingModule):
    """Linear layers, one after the other, each added to what it was given."""

    def __init__(self) -> None:
        limit_memory()
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        y = x
        for layer in self.layers:
            y = y + layer(y).tanh() / LAYERS
        loss = (y - x.roll(1, dims=1)).square().mean()
        self.log("loss", loss, on_epoch=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(SAMPLES, WIDTH, generator=generator)))
