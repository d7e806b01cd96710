"""Learning rates that grow with the batch, and the arithmetic of batch sizes."""

from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.data.feed_creation import device_batch_size
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.loop.position import scaled_rate, warmed_up_rate
from my_project_trainer.options import Options
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fitting
from fitting import logged

SIZES = st.integers(1, 10**6)
FACTORS = st.floats(1e-3, 1e3)


def by(rule: str, reference: int | None = None) -> Options:
    return Options(learning_rate_scaling=rule, reference_batch_size=reference)  # type: ignore[arg-type]


@given(batch=SIZES, reference=SIZES, device=SIZES)
def test_the_factor_follows_the_rule(batch: int, reference: int, device: int) -> None:
    assert scaled_rate(by("none", reference), batch, device) == 1.0
    linear = scaled_rate(by("linear", reference), batch, device)
    assert linear == pytest.approx(batch / reference)
    assert scaled_rate(by("sqrt", reference), batch, device) ** 2 == pytest.approx(linear)
    # Without a reference, what one device reads is it.
    assert scaled_rate(by("linear"), batch, device) == pytest.approx(batch / device)
    assert scaled_rate(by("linear"), batch, batch) == 1.0


@given(target=FACTORS, warmup=st.integers(0, 100), step=st.integers(0, 200))
def test_the_warm_up_is_a_straight_line(target: float, warmup: int, step: int) -> None:
    factor = warmed_up_rate(target, warmup, step)
    if step + 1 >= warmup:
        assert factor == pytest.approx(target)
    else:
        assert factor == pytest.approx(1 + (target - 1) * (step + 1) / warmup)
        assert min(1, target) <= factor <= max(1, target)
        assert abs(factor - target) >= abs(warmed_up_rate(target, warmup, step + 1) - target)


@given(
    per_device=st.integers(1, 100),
    replicas=st.integers(1, 64),
    accumulate=st.integers(1, 16),
    more=st.integers(0, 1023),
)
def test_a_global_batch_is_split_or_refused(per_device, replicas, accumulate, more):
    shares = replicas * accumulate
    size = per_device * shares + more % shares
    if size % shares == 0:
        assert device_batch_size(size, replicas, accumulate) == per_device
        return
    with pytest.raises(ConfigurationError) as raised:
        device_batch_size(size, replicas, accumulate)
    nearest = f"{per_device * shares} and {(per_device + 1) * shares}"
    assert raised.value.problems == [
        f"global_batch_size={size} is not divisible by {replicas} replicas times "
        f"accumulate_grad_batches={accumulate}; the nearest divisible sizes are {nearest}"
    ]


@pytest.mark.parametrize("size", [0, -8])
def test_a_global_batch_holds_something(size: int) -> None:
    with pytest.raises(ConfigurationError, match="the nearest divisible sizes are 4 and 8"):
        device_batch_size(size, 2, 2)


@pytest.mark.parametrize(("batch", "device"), [(None, None), (8, None), (None, 8)])
def test_a_batch_of_unknown_size_cannot_be_scaled(batch: int | None, device: int | None) -> None:
    assert scaled_rate(by("none"), batch, device) == 1.0
    with pytest.raises(ConfigurationError) as raised:
        scaled_rate(by("sqrt"), batch, device)
    problem = "learning_rate_scaling='sqrt': the loader's batch size is unknown"
    assert raised.value.problems == [f"{problem}; scale the rate in configure_optimizers"]


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_a_global_batch_needs_a_reference(rule: str) -> None:
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "global_batch_size": 8}
    with pytest.raises(ConfigurationError) as raised:
        trainer.Trainer(**options, learning_rate_scaling=rule)
    problem = f"learning_rate_scaling={rule!r} with global_batch_size"
    reason = "give reference_batch_size, the batch that the rate was chosen for"
    assert raised.value.problems == [f"{problem}: {reason}"]
    trainer.Trainer(**options, learning_rate_scaling=rule, reference_batch_size=4)
    trainer.Trainer(**options, learning_rate_scaling="none")


class Constant(trainer.TrainingModule):
    """A gradient of 1 in every step, so that a weight tells by which rate it was stepped."""

    def __init__(self, batches: Any = None) -> None:
        super().__init__()
        self.batches = batches
        self.weights = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
        self.steps: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append((-self.weights[0].item(), -self.weights[1].item()))
        return self.weights[0].sum() + self.weights[1].sum()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD([self.weights[0]], lr=0.5)]
        optimizers += [torch.optim.SGD([self.weights[1]], lr=2.0)]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.8)
        return optimizers, [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return self.batches or DataLoader(TensorDataset(torch.zeros(24)), batch_size=2)


def fit(folder: Path, model: Constant, **options: Any) -> Any:
    """Train for five steps of the model, writing what is logged; the trainer."""
    shown = {"loggers": ["csv"], "log_every_n_steps": 1, "enable_progress_bar": True}
    steps = {"max_steps": 5, "run_name": None}
    return fitting.fit(model, folder, **{**shown, **steps, **options})


LINEAR = {"learning_rate_scaling": "linear"}
TWICE = {**LINEAR, "accumulate_grad_batches": 2}
SQRT = {"learning_rate_scaling": "sqrt", "global_batch_size": 4, "reference_batch_size": 64}


@pytest.mark.parametrize(
    ("options", "target", "warmup"),
    [
        ({}, 1.0, 0),
        (LINEAR, 1.0, 0),
        (TWICE, 2.0, 0),
        ({**TWICE, "learning_rate_warmup_steps": 4}, 2.0, 4),
        ({**SQRT, "learning_rate_warmup_steps": 3}, 0.25, 3),
    ],
)
def test_a_rate_is_rule_times_warm_up_times_scheduler(tmp_path, capsys, options, target, warmup):
    run = fit(tmp_path, model := Constant(), **options)
    factors = [
        1 + (target - 1) * (step + 1) / warmup if step < warmup else target for step in range(5)
    ]
    decayed = [0.5 * 0.8**step * factor for step, factor in enumerate(factors)]
    rates = [decayed, [2.0 * factor for factor in factors]]
    for number, expected in enumerate(rates):
        assert logged(run.run_directory, f"lr-{number}") == pytest.approx(expected)
        assert -model.weights[number].item() == pytest.approx(sum(expected))
    announced = [line for line in capsys.readouterr().out.splitlines() if "rates times" in line]
    after = f", reached after {warmup} steps" if warmup else ""
    assert announced == ([f"learning rates times {target:g}{after}"] if target != 1 else [])


def test_a_checkpoint_holds_the_rates_of_optimizers_and_schedulers(tmp_path):
    options = {"learning_rate_scaling": "linear", "reference_batch_size": 1}
    run = fit(tmp_path, Constant(), **options, learning_rate_warmup_steps=4)
    state = checkpoint.Checkpoint(checkpoint.resolve(run.run_directory)).state()
    rates = [optimizer["param_groups"][0]["lr"] for optimizer in state["optimizers"]]
    assert rates == pytest.approx([0.5 * 0.8**5, 2.0])
    assert state["schedules"][0]["_last_lr"] == pytest.approx([0.5 * 0.8**5])
    assert state["schedules"][0]["base_lrs"] == [0.5]


def test_a_resumed_run_goes_on_in_the_warm_up(tmp_path):
    options = {"learning_rate_scaling": "linear", "reference_batch_size": 1}
    options |= {"learning_rate_warmup_steps": 4}
    uninterrupted = fit(tmp_path, Constant(), **options, run_name="whole")
    fit(tmp_path, Constant(), **options, run_name="stopped", max_steps=2)
    resumed = fit(tmp_path, Constant(), **options, resume=str(tmp_path / "stopped"))
    for name in ("lr-0", "lr-1"):
        assert logged(resumed.run_directory, name) == logged(uninterrupted.run_directory, name)
        assert len(logged(uninterrupted.run_directory, name)) == 5


def test_a_loader_that_does_not_tell_its_batch_size_is_refused(tmp_path):
    batches = [torch.zeros(2)] * 9
    with pytest.raises(ConfigurationError, match="the loader's batch size is unknown"):
        fit(tmp_path, Constant(batches), learning_rate_scaling="linear")
    fit(tmp_path, model := Constant(batches))
    assert -model.weights[1].item() == pytest.approx(10.0)
