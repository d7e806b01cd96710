"""Commands know the steps of a run, schedules do not change a search, and values count once."""

import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from my_project_trainer import Trainer, TrainingModule, UserError
from my_project_trainer.callbacks import Callback, EarlyStopping
from my_project_trainer.errors import CheckpointError
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from fitting import quiet

DATA = DataLoader(TensorDataset(torch.randn(32, 3, generator=torch.Generator())), batch_size=4)


class Net(TrainingModule):
    """Trains under a schedule, and notes the number of steps that each configuration sees."""

    seen: ClassVar[list[int | None]] = []  # of the class: a search trains copies

    def __init__(self, schedule: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.schedule = torch.nn.Linear(3, 1), schedule

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch[0]) - 1).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def configure_optimizers(self) -> Any:
        self.seen.append(self.trainer.total_steps)
        self.adam = torch.optim.Adam(self.parameters(), lr=0.1)
        steps: Any = self.trainer.total_steps
        made: dict[str, Any] = {
            "warm-up from 0": lambda: LambdaLR(self.adam, lambda step: min(1.0, step / steps)),
            "one cycle": lambda: OneCycleLR(self.adam, 0.1, total_steps=steps),
            "numpy": lambda: LambdaLR(self.adam, lambda step: np.cos(step / 16)),
        }
        if self.schedule == "plateau":
            plateau = ReduceLROnPlateau(self.adam, factor=0.1, patience=1)
            return {"optimizer": self.adam, "lr_scheduler": self.entry(plateau, "val_loss")}
        if not self.schedule:
            return self.adam
        return [self.adam], [{"scheduler": made[self.schedule](), "interval": "step"}]

    def entry(self, scheduler: Any, monitor: str) -> dict[str, Any]:
        return {"scheduler": scheduler, "monitor": monitor}


def make(folder: Path, **options: Any) -> Trainer:
    return quiet(**{"max_epochs": 3, "default_root_dir": folder} | options)


def test_each_command_knows_the_number_of_steps(tmp_path: Path) -> None:
    for command in ("fit", "find_learning_rate", "find_batch_size"):
        Net.seen.clear()
        getattr(make(tmp_path), command)(Net("one cycle"), DATA)
        assert {*Net.seen} == {24}


def test_an_unknown_number_of_steps_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"total_steps is None.*give max_steps"):
        make(tmp_path, max_epochs=None).find_learning_rate(Net("one cycle"), DATA)


@pytest.mark.parametrize("schedule", ["warm-up from 0", "one cycle"])
def test_a_schedule_does_not_change_the_rate_that_is_found(tmp_path: Path, schedule: str) -> None:
    rates = [make(tmp_path).find_learning_rate(Net(kind), DATA) for kind in ("", schedule)]
    assert rates[1] == pytest.approx(rates[0])


def test_a_plateau_counts_validations_not_epochs(tmp_path: Path) -> None:
    for epochs, rate in ((5, 0.1), (6, 0.01)):  # values after epochs 2, 4 and 6
        module = Net("plateau")
        make(tmp_path, max_epochs=epochs, check_val_every_n_epoch=2).fit(module, DATA, DATA)
        assert module.adam.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_value_of_an_epoch_counts_once_for_early_stopping(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss_epoch", patience=2, min_delta=100.0)
    trainer = make(tmp_path, val_every_n_steps=9, max_epochs=9, callbacks=[stopping])
    trainer.fit(Net(), DATA, DATA)
    assert trainer.global_step == 24  # best after 8; 16 and 24 are no better; 9 and 18 not new


def test_what_cannot_be_copied_is_shared_in_a_search(tmp_path: Path) -> None:
    module = Net()
    module.lock = threading.Lock()
    assert make(tmp_path).find_batch_size(module, DATA) == 32


def test_numpy_s_rates_are_saved_and_resumed(tmp_path: Path) -> None:
    weights = []
    for name, epochs, resume in (("a", 2, None), ("b", 1, None), ("b", 2, "auto")):
        module = Net("numpy")
        options: dict[str, Any] = {"run_name": name, "max_epochs": np.int64(epochs)}
        make(tmp_path, **options, max_steps=16, resume=resume).fit(module, DATA)
        weights.append(module.net.weight.detach())
    assert torch.allclose(weights[0], weights[2], atol=1e-6)


def test_names_of_lightning_are_there_or_named(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.fit(Net(), DATA, DATA)
    assert trainer.max_epochs == 3
    assert trainer.callback_metrics["val_loss"].item() == 1.0
    with pytest.raises(AttributeError, match="'logged_metrics'; use metrics"):
        getattr(trainer, "logged_metrics")  # noqa: B009
    with pytest.raises(AttributeError, match="max_epochs cannot be changed"):
        trainer.max_epochs = 5


def test_lazy_layers_are_named_before_training(tmp_path: Path) -> None:
    module = Net()
    module.net = torch.nn.LazyLinear(1)
    with pytest.raises(UserError, match=r"Net: net \(LazyLinear\): not initialized"):
        make(tmp_path).fit(module, DATA)


@pytest.mark.parametrize("strategy", ["ddp", "dp", "fsdp", "sequential"])
def test_an_embedding_that_changes_its_weight_is_not_trained_on_ranks(tmp_path, strategy):
    module = Net()
    module.words = torch.nn.Embedding(3, 2, max_norm=1.0)
    with pytest.raises(UserError, match=r"words: max_norm changes the rows that a forward reads"):
        make(tmp_path, strategy=strategy, devices=2).fit(module, DATA)


def test_deterministic_is_of_its_trainer_only(tmp_path: Path) -> None:
    strict = make(tmp_path, deterministic=True, max_steps=1)
    seen: list[bool] = []
    for trainer in (make(tmp_path, max_steps=1), strict):
        module = Net()
        note = lambda: seen.append(torch.are_deterministic_algorithms_enabled())  # noqa: E731
        module.on_fit_start = note
        trainer.fit(module, DATA)
    assert seen == [False, True]
    assert not torch.are_deterministic_algorithms_enabled()


class KeepsALock(Callback):
    """Its state is one that no checkpoint can contain."""

    steps = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


def test_a_state_that_cannot_be_saved_ends_a_run_before_its_first_step(tmp_path: Path) -> None:
    callback = KeepsALock()
    with pytest.raises(CheckpointError, match=r"KeepsALock/lock is a lock"):
        make(tmp_path, max_steps=1, callbacks=[callback]).fit(Net(), DATA)
    assert callback.steps == 0
