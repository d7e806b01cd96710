"""Schedulers, validation and logging: at which steps, and after a resume.

Numbers are compared with those of a plain torch loop.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Trainer, TrainingModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from fitting import quiet, rows

BATCHES = 4  # of an epoch
EPOCHS = 4
EVERY = 3  # steps between validations; every second epoch ends with one, too
# The validation loss, by step. At the ends of epochs ReduceLROnPlateau sees the values of steps 3,
# 8, 12 and 16; only the third is worse than the best so far.
VALIDATED = {3: 5.0, 6: 9.0, 8: 4.0, 9: 3.5, 12: 4.5, 15: 9.0, 16: 3.0}
PLATEAU = {"patience": 0, "factor": 0.5, "threshold": 1e-4}


def batches() -> list[Tensor]:
    return [torch.tensor([[1.0, float(number)]]) for number in range(BATCHES)]


class Scheduled(TrainingModule):
    """One scheduler per step, one per epoch and ReduceLROnPlateau."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.validated: list[int] = []
        self.steps: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps.append(self.global_step)
        return (batch @ self.weight).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.global_step)
        self.log("val_loss", VALIDATED.get(self.global_step, 0.0))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], schedules(optimizer)


def schedules(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {"scheduler": StepLR(optimizer, 5, 0.7), "interval": "step"},
        {"scheduler": StepLR(optimizer, 2, 0.3), "interval": "epoch"},
        {"scheduler": ReduceLROnPlateau(optimizer, **PLATEAU), "monitor": "val_loss"},
    ]


def make(folder: Path, **options: Any) -> Trainer:
    shared = {"max_epochs": EPOCHS, "log_every_n_steps": 1, "loggers": ["csv"], "sanity_check": 0}
    return quiet(**shared | {"default_root_dir": folder, "run_name": "run"} | options)


def logged(folder: Path, name: str) -> dict[int, float]:
    return {step: value for step, _, each, value in rows(folder) if each == name}


OFTEN: dict[str, Any] = {
    **{"val_every_n_steps": EVERY, "check_val_every_n_epoch": 2},
    **{"checkpoint_every_n_steps": 1, "keep_checkpoints": 99},
}


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scheduled]:
    """An uninterrupted run: its folder, and the module."""
    folder = tmp_path_factory.mktemp("whole")
    module = Scheduled()
    make(folder, **OFTEN).fit(module, batches(), [torch.ones(1)])
    return folder / "run", module


def test_validation_runs_every_n_steps_and_every_n_epochs(full_run: tuple[Path, Scheduled]) -> None:
    folder, module = full_run
    assert module.validated == list(VALIDATED)
    assert logged(folder, "val_loss") == VALIDATED


def test_a_resume_from_any_step_continues_at_the_same_learning_rates(full_run, tmp_path):
    folder, module = full_run
    rates = logged(folder, "lr")
    checkpoints = sorted((folder / "checkpoints").iterdir())
    assert len(checkpoints) == BATCHES * EPOCHS
    for checkpoint in checkpoints[:-1]:
        step = int(checkpoint.name.removeprefix("step-"))
        resumed = Scheduled()
        options = {**OFTEN, "resume": str(checkpoint), "run_name": checkpoint.name}
        make(tmp_path, **options).fit(resumed, batches(), [torch.ones(1)])
        assert resumed.steps == list(range(step, BATCHES * EPOCHS)), step
        after = {number: rate for number, rate in rates.items() if number > step}
        assert logged(tmp_path / checkpoint.name, "lr") == after, step
        assert resumed.weight.equal(module.weight), step


@pytest.mark.parametrize(
    ("every", "expected"), [(1, [4, 8, 12]), (2, [8, 12]), (3, [12]), (4, [12])]
)
def test_validation_runs_every_n_epochs_and_at_the_end(tmp_path, every, expected):
    module = Scheduled()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.01)
    made = make(tmp_path, check_val_every_n_epoch=every, max_epochs=3)
    made.fit(module, batches(), [torch.ones(1)])
    assert module.validated == expected


def test_a_run_that_ended_is_not_validated_twice_at_its_last_step(tmp_path: Path) -> None:
    options = {**OFTEN, "max_steps": EVERY}
    first, again = Scheduled(), Scheduled()
    make(tmp_path, **options).fit(first, batches(), [torch.ones(1)])
    make(tmp_path, **options, resume="auto").fit(again, batches(), [torch.ones(1)])
    assert (first.validated, again.validated) == ([EVERY], [])


class Reads(Scheduled):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[float] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.read += batch[0][:, 1].tolist()
        return (batch[0] @ self.weight).square().mean() * 1e-6

    def configure_optimizers(self) -> Any:
        self.total_steps = self.trainer.total_steps
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        numbers = torch.arange(24.0)
        return DataLoader(TensorDataset(torch.stack([numbers, numbers], 1)), batch_size=2)


def test_a_resume_with_another_batch_size_continues_at_the_same_sample(tmp_path, capsys):
    options = {"max_epochs": 1, "checkpoint_every_n_steps": 1, "enable_progress_bar": True}
    before, after = Reads(), Reads()
    make(tmp_path, **options, global_batch_size=4, max_steps=3).fit(before)
    make(tmp_path, **options, global_batch_size=6, resume="auto").fit(after)
    assert len(before.read) == len(after.read) == 12
    assert sorted(before.read + after.read) == list(range(24))
    printed, told = capsys.readouterr()
    assert "read again" not in told
    assert "note: the effective batch size is 6; it was 4\n" in told
    assert (before.total_steps, after.total_steps) == (3, 5)  # 3 of 4 samples, and 2 of 6
    assert re.findall(r"total steps (\d+)", printed) == ["3", "5"]
    again = Reads()
    make(tmp_path, **options, global_batch_size=8, run_name="other", max_steps=1).fit(Reads())
    make(tmp_path, **options, global_batch_size=6, run_name="other", resume="auto").fit(again)
    assert len(again.read) == 18  # 2 of the 8 samples are read again
    assert re.search("it was 8: 2 samples of this epoch are read again", capsys.readouterr().err)


def test_the_total_steps_of_a_resume_with_another_batch_size_at_the_end_of_an_epoch(tmp_path):
    """Two epochs of 6 steps, then one of 3; with the first size, a resume changes nothing."""
    options = {"run_name": "run", "global_batch_size": 4}
    make(tmp_path, **options, max_epochs=2).fit(Reads())
    for size, total in ((4, 18), (8, 15)):
        again = Reads()
        other = {"max_epochs": 3, "resume": str(tmp_path / "run"), "run_name": f"{size}"}
        made = make(tmp_path, **{**options, "global_batch_size": size, **other})
        made.fit(again)
        assert (again.total_steps, made.global_step) == (total, total)
