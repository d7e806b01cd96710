"""The learning rate at which the loss falls most steeply is found, and nothing else is changed."""

import copy
import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Trainer
from my_project_trainer.callbacks import EMA
from my_project_trainer.errors import ConfigurationError, UserError
from my_project_trainer.loop import trials

import control_subject as subject
from fitting import logged, quiet


def make(folder: Path, **options: Any) -> Trainer:
    shared = {"max_epochs": 1, "loggers": ["csv"], "default_root_dir": folder}
    return quiet(**{**shared, "run_name": "sweep", **options})


@pytest.mark.parametrize("is_random", [False, True])
def test_the_steepest_rate_is_returned_and_each_step_written(tmp_path, is_random):
    module = subject.Net(is_random)
    before = copy.deepcopy(module.state_dict())
    searching = make(tmp_path, accumulate_grad_batches=2)
    rate = searching.find_learning_rate(module, lowest=1e-5, highest=1e3, steps=50)
    with (tmp_path / "sweep" / "learning_rates.csv").open() as file:
        rows = [[float(value) for value in row.values()] for row in csv.DictReader(file)]
    tried = [trials.Tried(*row) for row in rows]
    expected = [10 ** (step * 8 / 49 - 5) for step in range(len(tried))]
    assert [trial.rate for trial in tried] == pytest.approx(expected)
    assert tried[0].change == 0
    assert max(abs(trial.change) for trial in tried[:5]) < 1e-2  # only the samples differ
    assert len(tried) < 50  # the loss diverges, and ends the sweep
    assert 1e-3 < rate < 1
    assert rate == trials.suggest(tried)
    assert all(weight.equal(module.state_dict()[name]) for name, weight in before.items())
    assert module.seen["training"] == []  # a copy was trained
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_first_steps_are_those_of_a_fit_at_these_rates(tmp_path: Path) -> None:
    """A sweep of almost equal rates gives the losses of a fit."""
    options: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    module = subject.Net()
    sweep = {"lowest": 0.02, "highest": 0.02 * (1 + 1e-9), "steps": 20}
    assert make(tmp_path, **options).find_learning_rate(module, **sweep) == pytest.approx(0.02)
    with (tmp_path / "sweep" / "learning_rates.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    constant = {"lr": 0.02, "momentum": 0.5}
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), **constant)
    make(tmp_path, **options, run_name="fit", max_epochs=4, log_every_n_steps=1).fit(module)
    assert losses == pytest.approx(logged(tmp_path / "fit", "loss_step"), rel=1e-5)


def test_the_suggestion_is_where_the_smoothed_loss_falls_most() -> None:
    def suggested(losses: list[float]) -> float:
        tried = [trials.Tried(10.0**n, x + n % 3, 1.0 + n % 3) for n, x in enumerate(losses)]
        return trials.suggest(tried)

    # Smoothing delays the fall at 1e30.
    assert 1e30 <= suggested([1 / (1 + math.exp(step - 30)) for step in range(60)]) <= 1e34
    for losses in ([1.0] * 60, [float(step) for step in range(60)], [1.0]):
        with pytest.raises(UserError, match="the loss does not fall at any rate from 1 to 1"):
            suggested(losses)


def test_what_cannot_be_tried_is_refused_at_once(tmp_path: Path) -> None:
    module = subject.Net()
    with pytest.raises(ConfigurationError, match="give numbers above 0"):
        make(tmp_path).find_learning_rate(module, lowest=1.0, highest=0.1)
    with pytest.raises(ConfigurationError, match="steps=3: give at least 20"):
        make(tmp_path).find_learning_rate(module, steps=3)
    with pytest.raises(ConfigurationError, match="strategy='fsdp' does not train the"):
        make(tmp_path, devices=2, strategy="fsdp").find_learning_rate(module)
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="with manual optimization, training_step steps"):
        make(tmp_path, callbacks=[EMA()]).find_learning_rate(module)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_batch_of_a_module_with_batchnorm(tmp_path, capsys):
    """BatchNorm refuses a single sample in training."""
    searching = make(tmp_path, enable_progress_bar=True)
    assert searching.find_batch_size(subject.Net(is_random=True)) == subject.SAMPLES
    why = f"no larger one was tried: the dataset has {subject.SAMPLES} samples"
    assert f"every device: {subject.SAMPLES}; {why}\n" in capsys.readouterr().out
