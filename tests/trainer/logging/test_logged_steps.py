"""Which steps a fit logs: the first, every N-th and the last; and what it leaves on the disk."""

import os
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fitting import Descends, rows


class Slope(Descends, lr=1.0):
    """Logs the number of its steps as the loss, and has six batches an epoch."""

    def __init__(self, batches: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.batches = batches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("loss", float(self.global_step + 1))
        return self.weight * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 0.5)

    def train_dataloader(self) -> Any:
        if self.batches is not None:
            return self.batches
        return DataLoader(TensorDataset(torch.zeros(12)), batch_size=2)


class Validated(Slope):
    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(2)))


class Endless(IterableDataset[Tensor]):
    """Six samples, of which nobody knows the number before."""

    def __iter__(self) -> Any:
        return iter(torch.zeros(6))


def fit(folder: Path, module: Any = None, **options: Any) -> Any:
    """Train on six steps an epoch, and log every fifth."""
    defaults = {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 5, "loggers": ["csv"]}
    made = trainer.Trainer(**{**defaults, "default_root_dir": folder, **options})
    made.fit(module or Slope())
    return made


def logged(made: Any, name: str) -> list[tuple[int, float]]:
    """Steps and values; the losses say the step too."""
    return [(step, value) for step, _, each, value in rows(made.run_directory) if each == name]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 2}, [1, 5, 10, 12]),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, [1, 4]),
        ({"max_steps": 3}, [1, 3]),
        ({"max_steps": 10}, [1, 5, 10]),
        ({"max_steps": 1}, [1]),
        ({"max_epochs": 1, "max_steps": 100, "log_every_n_steps": 50}, [1, 6]),
    ],
)
def test_the_first_and_the_last_step_are_logged(tmp_path, capsys, options, steps):
    made = fit(tmp_path, **options)
    assert logged(made, "loss") == [(step, float(step)) for step in steps]
    if "max_steps" in options and options["max_steps"] < 100:
        assert made.metrics["loss"] == steps[-1]
    text = f"loss {made.metrics['loss']:.4g}  "
    assert text in f"{capsys.readouterr().out.splitlines()[-2]}  "


def test_the_mean_of_each_epoch_is_logged_and_is_the_latest_value(tmp_path):
    seen: list[Any] = []

    class Notes(trainer.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.metrics["loss"])

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            seen.append((trainer.metrics["loss"], trainer.metrics["loss_epoch"]))

    module = Validated(DataLoader(TensorDataset(torch.zeros(110)), batch_size=2))
    made = fit(tmp_path, module, max_epochs=2, log_every_n_steps=50, callbacks=[Notes()])
    assert logged(made, "loss") == [(step, float(step)) for step in (1, 50, 100, 110)]
    assert logged(made, "loss_epoch") == [(55, 28.0), (110, 83.0)]
    assert seen == [28.0, (28.0, 28.0), 83.0, (83.0, 83.0)]
    assert made.metrics == {"loss": 83.0, "loss_epoch": 83.0, "lr": 1.0, "val_loss": 0.5}


def test_the_last_step_of_a_loader_of_unknown_length_is_logged(tmp_path):
    made = fit(tmp_path, Slope(DataLoader(Endless(), batch_size=1)), max_epochs=2)
    assert logged(made, "loss") == [(step, float(step)) for step in (1, 5, 10, 12)]


@pytest.mark.parametrize(
    ("options", "steps"), [({}, [1, 5, 10, 12]), ({"val_every_n_steps": 2}, [1, 4])]
)
def test_the_last_step_before_early_stopping_is_logged(tmp_path, options, steps):
    stopping = EarlyStopping("val_loss", patience=1)
    made = fit(tmp_path, Validated(), max_epochs=9, callbacks=[stopping], **options)
    assert logged(made, "loss") == [(step, float(step)) for step in steps]
    assert made.metrics["loss"] == (9.5 if not options else steps[-1])  # steps 7 to 12


class Decays(Slope):
    def configure_optimizers(self) -> Any:
        sgd = super().configure_optimizers()
        halved = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
        return [sgd], [{"scheduler": halved, "interval": "step"}]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_the_last_step_is_logged_if_a_hook_stops_training(tmp_path, hook, accumulate):
    class Stops(trainer.Callback):
        pass

    def stop(self: Any, trainer: Any, module: Any, *arguments: Any) -> None:
        if arguments[-1] == 5:  # the index of the batch
            trainer.stop("the sixth batch")

    setattr(Stops, hook, stop)
    loader = DataLoader(TensorDataset(torch.zeros(20)), batch_size=2)
    made = fit(
        *(tmp_path, Decays(loader)),
        **{"callbacks": [Stops()], "max_epochs": 9, "log_every_n_steps": 50},
        **{"accumulate_grad_batches": accumulate, "learning_rate_scaling": "linear"},
        **{"reference_batch_size": 1, "learning_rate_warmup_steps": 4},
    )
    last = 6 // accumulate
    assert logged(made, "loss") == [(1, 1.0), (last, float(last))]
    factors = [1 + (2 * accumulate - 1) * min(step / 4, 1) for step in (1, last)]
    assert logged(made, "lr") == [(1, factors[0]), (last, factors[1] * 0.5 ** (last - 1))]


def test_the_last_step_is_logged_if_the_time_is_over(tmp_path):
    class Late(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 3:
                time.sleep(1.1)
            return super().training_step(batch, batch_idx)

    made = fit(tmp_path, Late(), max_time={"seconds": 1}, max_epochs=99, log_every_n_steps=50)
    last = made.global_step
    assert logged(made, "loss") == [(1, 1.0), (last, float(last))]


@pytest.mark.parametrize("shorter", [{"max_epochs": 1}, {"max_steps": 8}])
def test_a_run_that_is_extended_logs_what_one_fit_does(tmp_path, shorter):
    uninterrupted = fit(tmp_path, run_name="whole", max_epochs=3)
    first = fit(tmp_path, run_name="two", **shorter)
    assert logged(first, "loss")[-1][0] == (6 if "max_epochs" in shorter else 8)
    second = fit(tmp_path, run_name="two", resume="auto", max_epochs=3)
    assert rows(second.run_directory) == rows(uninterrupted.run_directory)


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o027, 0o640, 0o750), (0o002, 0o664, 0o775)]
)
def test_the_umask_decides_the_permissions_of_all_that_a_run_writes(tmp_path, umask, file, folder):
    before = os.umask(umask)
    try:
        made = fit(tmp_path / "runs", max_steps=2, loggers=["csv", "tensorboard"])
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in made.run_directory.rglob("*")}
    assert {path.suffix for path in modes} >= {".safetensors", ".json", ".csv"}
    # Only their user's: they may hold secrets.
    private = {"run.json"}
    assert {modes[path] for path in modes if path.name in private} == {0o600}
    wrong = {
        str(path.relative_to(tmp_path)): oct(mode)
        for path, mode in modes.items()
        if path.name not in private and mode != (folder if path.is_dir() else file)
    }
    assert wrong == {}


EPOCH_HOOKS = ["on_fit_start", "on_train_epoch_start", "on_train_epoch_end"]
STEP_HOOKS = [
    *("on_train_batch_start", "on_before_optimizer_step", "on_after_optimizer_step"),
    "on_train_batch_end",
]


def logging_in(hook: str, **options: Any) -> Slope:
    """A module that logs the number of its steps in a hook."""

    def log(self: Any, *arguments: Any) -> None:
        self.log("x", torch.tensor(float(self.global_step)), **options)

    module: Slope = type("Logs", (Validated,), {hook: log})()
    return module


@pytest.mark.parametrize("options", [{}, {"on_epoch": True}])
@pytest.mark.parametrize("hook", EPOCH_HOOKS)
def test_hooks_of_an_epoch_log_its_value(tmp_path, hook, options):
    made = fit(tmp_path, logging_in(hook, **options), max_epochs=3)
    starts = hook != "on_train_epoch_end"
    expected = [(6 * n, 6.0 * (n - starts)) for n in (1, 2, 3)]
    assert logged(made, "x") == (expected[:1] if hook == "on_fit_start" else expected)


@pytest.mark.parametrize("hook", STEP_HOOKS)
def test_hooks_of_a_step_log_its_value(tmp_path, hook):
    made = fit(tmp_path, logging_in(hook), max_epochs=1)
    before = hook in ("on_train_batch_start", "on_before_optimizer_step")
    assert logged(made, "x") == [(step, float(step - before)) for step in (1, 5, 6)]


@pytest.mark.parametrize("hook", ["on_validation_epoch_start", "on_validation_epoch_end"])
def test_hooks_of_a_validation_log_its_value(tmp_path, hook):
    made = fit(tmp_path, logging_in(hook), max_epochs=2)
    assert logged(made, "x") == [(6, 6.0), (12, 12.0)]


def test_a_hook_that_belongs_to_nothing_says_so(tmp_path):
    with pytest.raises(trainer.UserError, match=r"log\('x'\): nothing is logged in this hook; "):
        fit(tmp_path, logging_in("on_fit_end"), max_epochs=1)


def test_a_resume_logs_what_hooks_of_an_epoch_have_logged_before(tmp_path):
    def made(name: str, **options: Any) -> Any:
        module = logging_in("on_train_epoch_start", reduce_fx="sum")
        return fit(tmp_path, module, run_name=name, **options)

    uninterrupted = made("whole", max_epochs=2)
    made("two", max_steps=8)
    second = made("two", max_epochs=2, resume="auto")
    assert rows(second.run_directory) == rows(uninterrupted.run_directory)
