"""A model with shared weights and a frozen layer, and an average of its weights.

``python -m averaging_subject DEVICES STRATEGY:STEPS:RUN …`` trains it for each word in turn, and
resumes if RUN has a checkpoint; the main rank writes the losses of validations to ``RUN.json``, and
to ``RUN-storages.json`` how many bytes of memory the state of each save has taken.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import my_project_trainer as trainer
import torch
from my_project_trainer.callbacks import EMA
from my_project_trainer.loop import saving
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fitting import draw, quiet
from live_storages import Live

DECAY = 0.7
# What a validation has gathered must not be trained.
OPTIONS = {"fsdp": {"reshard_after_forward": False}}


class Net(trainer.TrainingModule):
    """A small network; its third and first layers share their weights."""

    batch_size = 4

    def __init__(self) -> None:
        super().__init__()
        frozen = nn.Linear(6, 6)
        frozen.requires_grad_(False)
        tied = nn.Linear(6, 6)
        tied_again = nn.Linear(6, 6)
        tied_again.weight = tied.weight
        # The pipeline's stages split it; tied layers are on one of them.
        self.sequential_module = nn.Sequential(tied, nn.Tanh(), tied_again, frozen, nn.Linear(6, 3))
        draw(self, seed=5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.sequential_module(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.sequential_module(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.5)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*_data(32)), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*validation_data()), batch_size=4)

    test_dataloader = val_dataloader


def _data(samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))
    return x, x[:, :3] * x[:, 3:]


def validation_data() -> tuple[Tensor, Tensor]:
    return _data(12)


class Records(trainer.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.losses.append(trainer.metrics["val_loss"])


SAVES: list[int] = []
_state = saving.state


def counted_state(fit: Any) -> dict[str, Any]:
    """What a checkpoint contains, and how many bytes of it are copies."""
    with Live() as live:
        live.begin()
        state = _state(fit)
        SAVES.append(live.added())
    return state


def fit(strategy: str, devices: int, steps: int, name: str, **options: Any) -> Records:
    """Train, from the newest checkpoint of a run if it has one."""
    records = Records()
    shared = {"global_batch_size": 4, "val_every_n_steps": 2, "callbacks": [EMA(DECAY), records]}
    shared |= {"strategy": strategy, "devices": devices, "strategy_options": OPTIONS.get(strategy)}
    shared |= {"max_steps": steps, "run_name": name, "resume": "auto", "loggers": ["csv"]}
    made = quiet(**shared | options)
    with made.building():
        model = Net()
    SAVES.clear()
    with mock.patch.object(saving, "state", counted_state):
        made.fit(model)
    if made.global_rank == 0:
        Path(f"{name}.json").write_text(json.dumps(records.losses))
        Path(f"{name}-storages.json").write_text(json.dumps(SAVES))
    return records


if __name__ == "__main__":
    for word in sys.argv[2:]:
        chosen, steps, run_name = word.split(":")
        fit(chosen, int(sys.argv[1]), int(steps), run_name)
