"""A checkpoint whose state does not fit, under checksums that are right, is refused in a line."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import CheckpointError, TrainingModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from checkpoint_subject import rewrite
from fitting import quiet

FORGED: list[tuple[str, ...]] = [
    ("state", "model"),
    ("state", "optimizers"),
    ("state", "optimizers", 0, "param_groups"),
    ("state", "optimizers", 0, "param_groups", 0, "initial_lr"),
    ("state", "optimizers", 0, "state", "first.weight"),
    ("state", "schedules"),
    ("state", "schedules", 1),
    ("state", "position", "epoch"),
    ("state", "position", "seconds"),
    ("state", "latest", "loss_epoch"),
    ("state", "logs", "csv"),
    ("state", "callbacks", "EMA", "count"),
    ("state", "callbacks", "BestCheckpoint(val_loss, min)", "kept"),
]


class Line(TrainingModule):
    def __init__(self, schedules: bool = True) -> None:
        super().__init__()
        self.schedules = schedules
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self.last(self.first(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.last(self.first(batch[0])), batch[1]))

    def train_dataloader(self) -> Any:
        x = torch.arange(16.0).view(8, 2) / 16
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.first.parameters(), lr=0.01)
        sgd = torch.optim.SGD(self.last.parameters(), lr=0.01, momentum=0.9)
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(adam, 1), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(sgd), "monitor": "val_loss"},
        ]
        return [adam, sgd], schedulers[: 2 * self.schedules]


def fit(root: Path, module: Line | None = None, **options: Any) -> None:
    monitored = {"init_args": {"monitor": "val_loss"}}
    callbacks: list[Any] = [
        {"class_path": "EMA", "init_args": {"decay": 0.9}},
        {"class_path": "BestCheckpoint", **monitored},
        {"class_path": "EarlyStopping", **monitored},
    ]
    shared = {"val_every_n_steps": 1, "log_every_n_steps": 1, "loggers": ["csv"]}
    shared |= {"default_root_dir": root, "callbacks": callbacks}
    quiet(**shared | options).fit(module or Line())


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    tree = copy.deepcopy(tree)
    *above, last = path
    inner = tree
    for key in above:
        inner = inner[key]
    inner[last] = value
    return tree


@pytest.mark.usefixtures("apart")
def test_what_does_not_fit_is_refused_in_a_line(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=5, run_name="good")
    good = tmp_path / "good" / "checkpoints" / "step-00000005"
    for path in FORGED:
        forged = tmp_path / "forged"
        shutil.rmtree(forged, ignore_errors=True)
        shutil.copytree(good, forged)
        rewrite(forged, lambda content, path=path: replaced(content, path, "x"))
        with pytest.raises(CheckpointError) as raised:
            fit(tmp_path, max_steps=7, run_name="resumed", overwrite=True, resume=str(forged))
        (line,) = raised.value.problems
        assert line.startswith(f"{forged}: does not match this model ("), path
        assert line.endswith("); see docs/trouble.md#a-checkpoint-of-another-model"), path


@pytest.mark.usefixtures("apart")
def test_the_state_of_another_optimizer_is_refused_in_a_line(tmp_path: Path) -> None:
    class Other(Line):
        def configure_optimizers(self) -> Any:
            sgd = torch.optim.SGD(self.first.parameters(), lr=0.01)
            return [sgd, torch.optim.SGD(self.last.parameters(), lr=0.01, momentum=0.9)]

    fit(tmp_path, Line(schedules=False), max_steps=2, run_name="run", callbacks=[])
    with pytest.raises(CheckpointError) as raised:
        fit(tmp_path, Other(), max_steps=4, run_name="run", resume="auto", callbacks=[])
    assert raised.value.problems == [
        f"{tmp_path}/run/checkpoints/step-00000002: its optimizer is not SGD: it has no "
        "'dampening'; use the optimizer of the checkpoint, or start a new run with weights=PATH"
    ]
