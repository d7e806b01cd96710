"""Trains linear layers in float8 (emulated on a CPU); started by ``test_float8.py``.

``python -m float8_subject FOLDER OPTIONS`` (arguments of the trainer as JSON) trains on ranks.
"""

import json
import sys
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Net(trainer.TrainingModule):
    """Two blocks, and a head whose size float8 does not take."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.blocks(batch[0])).float(), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(32, WIDTH, generator=generator), torch.arange(32) % 3
        return DataLoader(TensorDataset(x, y))


def fit(folder: Path, name: str, options: dict[str, Any], module: Net) -> trainer.Trainer:
    """Train a module with a trainer's options."""
    defaults = {"accelerator": "cpu", "global_batch_size": 16, "max_steps": 2, "loggers": []}
    defaults |= {"devices": 1, "precision": "bf16-mixed", "enable_progress_bar": False}
    run = trainer.Trainer(**{**defaults, **options, "default_root_dir": folder, "run_name": name})
    run.fit(module)
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    fit(Path(sys.argv[1]), "run", json.loads(sys.argv[2]), Net())
