"""Each of torch's schedulers, by step and epoch, whole and resumed, against a plain torch loop."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import TrainingModule
from test_schedules import BATCHES, EPOCHS, batches
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler, swa_utils

from fitting import logged, quiet

Make = Callable[[Optimizer], Any]


class Halves:
    """A callable with a state, which torch saves with the scheduler."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**epoch + 0.01 * self.calls


def warm_up_and_cosine(optimizer: Optimizer) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    second = lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [2])


def chained(optimizer: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.3, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def nested(optimizer: Optimizer) -> Any:
    parts = [warm_up_and_cosine(optimizer), lr_scheduler.StepLR(optimizer, 3, 0.7)]
    return lr_scheduler.ChainedScheduler(parts)


def warm_restarts(optimizer: Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2)


SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda each: lr_scheduler.LambdaLR(each, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda each: lr_scheduler.LambdaLR(each, Halves()),
    "MultiplicativeLR": lambda each: lr_scheduler.MultiplicativeLR(each, lambda epoch: 0.9),
    "StepLR": lambda each: lr_scheduler.StepLR(each, 2, 0.3),
    "MultiStepLR": lambda each: lr_scheduler.MultiStepLR(each, [1, 3, 3, 9], 0.5),
    "ConstantLR": lambda each: lr_scheduler.ConstantLR(each, 0.2, 3),
    "LinearLR": lambda each: lr_scheduler.LinearLR(each, 0.2, total_iters=3),
    "ExponentialLR": lambda each: lr_scheduler.ExponentialLR(each, 0.8),
    "PolynomialLR": lambda each: lr_scheduler.PolynomialLR(each, 12, 2.0),
    "CosineAnnealingLR": lambda each: lr_scheduler.CosineAnnealingLR(each, 3),
    "CosineAnnealingWarmRestarts": warm_restarts,
    "CyclicLR": lambda each: lr_scheduler.CyclicLR(each, 0.001, 0.02, 2),
    "CyclicLR of a function": lambda each: lr_scheduler.CyclicLR(
        each, 0.001, 0.02, 2, scale_fn=lambda x: 0.9**x, scale_mode="iterations"
    ),
    "OneCycleLR": lambda each: lr_scheduler.OneCycleLR(each, 0.02, BATCHES * EPOCHS + 1),
    "ReduceLROnPlateau": lambda each: lr_scheduler.ReduceLROnPlateau(each, factor=0.5, patience=0),
    "SequentialLR": warm_up_and_cosine,
    "ChainedScheduler": chained,
    "SequentialLR in ChainedScheduler": nested,
    "SWALR": lambda each: swa_utils.SWALR(each, 0.001, 3),
}


def test_all_of_torch_are_listed() -> None:
    listed = {type(make(optimizer())).__name__ for make in SCHEDULERS.values()}
    assert listed == {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"}


def optimizer(weight: Tensor | None = None) -> Optimizer:
    other = nn.Parameter(torch.ones(2))
    groups = [{"params": [other if weight is None else weight]}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


class Scheduled(TrainingModule):
    def __init__(self, make: Make, interval: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.make, self.interval = make, interval

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("monitored", float(batch_idx + 1), on_epoch=True)
        return (batch @ self.weight).square().mean()

    def configure_optimizers(self) -> Any:
        stepped = optimizer(self.weight)
        entry = {"scheduler": self.make(stepped), "interval": self.interval}
        if isinstance(entry["scheduler"], lr_scheduler.ReduceLROnPlateau):
            entry["monitor"] = "monitored_step"
        return {"optimizer": stepped, "lr_scheduler": entry}


def plain_loop(make: Make, interval: str) -> tuple[list[float], Tensor]:
    """The learning rate of each step, and the final weights."""
    weight = nn.Parameter(torch.ones(2))
    stepped = optimizer(weight)
    scheduler, rates = make(stepped), []
    is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches(), start=1):
            rates.append(stepped.param_groups[0]["lr"])
            stepped.zero_grad()
            (batch @ weight).square().mean().backward()
            stepped.step()
            if interval == "step" or number == BATCHES:
                scheduler.step(*[float(number)] * is_plateau)
    return rates, weight.detach()


def fit(folder: Path, module: Scheduled, **options: Any) -> list[float]:
    """Train; the learning rates that were logged."""
    saves = {"checkpoint_every_n_steps": 1, "keep_checkpoints": 99, "max_epochs": EPOCHS}
    shown = {"loggers": ["csv"], "log_every_n_steps": 1, "default_root_dir": folder}
    made = quiet(**{"run_name": "run", **saves, **shown, **options})
    made.fit(module, batches())
    return logged(made.run_directory, "lr")


@pytest.mark.parametrize(
    ("name", "interval"),
    [*((name, "step") for name in SCHEDULERS), ("StepLR", "epoch"), ("ReduceLROnPlateau", "epoch")],
)
def test_rates_and_weights_are_those_of_a_plain_loop_also_resumed(tmp_path, capsys, name, interval):
    make = SCHEDULERS[name]
    rates, weight = plain_loop(make, interval)
    assert len(set(rates)) > 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*lr_scheduler")
        uninterrupted = Scheduled(make, interval)
        assert fit(tmp_path, uninterrupted) == rates
        assert uninterrupted.weight.equal(weight)
        checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
        resumed, step = Scheduled(make, interval), 6
        rest = fit(tmp_path, resumed, resume=str(checkpoints[step - 1]), run_name="resumed")
        assert rest == rates[step:]
        assert resumed.weight.equal(weight)
    assert "stepped by user code" not in capsys.readouterr().err


class StepsToo(Scheduled):
    """Steps its scheduler, which the trainer steps."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Detected call")
def test_a_scheduler_that_the_module_steps_too_is_noted_once(tmp_path, capsys):
    fit(tmp_path, StepsToo(SCHEDULERS["StepLR"], "step"))
    assert capsys.readouterr().err.count("note: StepLR was stepped by user code, and is ") == 1
