"""A loss that is not finite ends the fit, and never replaces good weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import errors
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.loop import checks, position
from tests.project import PACKAGE, run

import fitting
from nonfinite_subject import Diverges
from processes import at_root


def fit(folder: Path, module: Any, **options: Any) -> Any:
    """Train for an epoch of twelve steps; log the first and the last."""
    return fitting.fit(module, folder, **{"max_epochs": 1, **options})


def saved(folder: Path) -> list[str]:
    """The checkpoints of the run, all of which must be finite."""
    checkpoints = run_directory.complete(folder / "run" / "checkpoints")
    for path in checkpoints:
        model = checkpoint.Checkpoint(path).state()["model"]
        assert all(model[f"linear.{name}"].isfinite().all() for name in ("weight", "bias"))
    return [path.name for path in checkpoints]


@pytest.mark.parametrize(
    ("strategy", "manual"), [("single_device", False), ("single_device", True), ("dp", False)]
)
@pytest.mark.parametrize("what", ["nan", "inf"])
def test_a_loss_that_is_not_finite_ends_the_fit(tmp_path, what, strategy, manual):
    module = Diverges(what, manual=manual)
    with pytest.raises(errors.UserError) as raised:
        fit(tmp_path, module, strategy=strategy, checkpoint_every_n_steps=3)
    [line] = raised.value.problems
    # It is noticed before the save of step 6, and no step is saved after the third.
    newest = tmp_path / "run" / "checkpoints" / "step-00000003"
    advice = "set gradient_clip_val, or train on with --trainer.nonfinite_loss skip"
    advice = "step only where the loss is finite" if manual else advice
    assert line == (
        "the loss of step 4 is not finite (NaN or infinite) on rank 0; the last good checkpoint "
        f"is {newest}; lower the learning rate or {advice}"
    )
    assert saved(tmp_path) == ["step-00000003"]


def test_the_last_step_of_a_fit_is_looked_at_too(tmp_path):
    with pytest.raises(errors.UserError, match=r"the loss of step 12 is .*there is no checkpoint"):
        fit(tmp_path, Diverges(step=12))
    assert saved(tmp_path) == []


def test_a_recorded_step_ends_it_at_once(tmp_path):
    module = Diverges(step=4, ever=True)
    steps = []
    original = module.training_step
    module.training_step = lambda *a: (steps.append(module.global_step), original(*a))[1]
    with pytest.raises(errors.UserError, match="the loss of step 4"):
        fit(tmp_path, module, log_every_n_steps=5)
    assert steps == [0, 1, 2, 3, 4]


def test_it_can_be_turned_off(tmp_path):
    assert fit(tmp_path, Diverges(), nonfinite_loss="ignore").global_step == 12


def test_a_finite_loss_with_an_infinite_gradient_is_not_saved(tmp_path):
    with pytest.raises(errors.UserError) as raised:
        fit(tmp_path, Diverges("gradient", step=3), checkpoint_every_n_steps=1)
    [line] = raised.value.problems
    assert "parameter linear.weight is not finite (NaN or infinite) on rank 0 after step 3" in line
    assert saved(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_step_that_the_gradient_scaler_skips_does_not_count(tmp_path):
    assert fit(tmp_path, Diverges(), precision="16-mixed").global_step == 12
    assert saved(tmp_path) == ["step-00000012"]


def test_a_gradient_scaler_that_skips_every_step_ends_the_fit(tmp_path):
    line = r"the gradient scaler's scale fell to .* by step 36:"
    steady = {"precision": "16-mixed", "max_epochs": 8, "checkpoint_every_n_steps": 40}
    with pytest.raises(errors.UserError, match=line):
        fit(tmp_path, Diverges(step=2, ever=True), **steady)


def test_more_losses_than_are_kept_are_all_looked_at():
    where = position.Position()
    losses = checks.LossRecord(torch.device("cpu"), where)
    for number in range(1, 200):
        where.global_step = number - 1
        loss = float("inf") if number in (70, 150) else 1e300
        losses.note(torch.tensor(loss, dtype=torch.float64))
    assert losses.first_step().tolist() == [70.0]


def test_no_step_waits_for_its_loss():
    """A meta tensor has no value: whatever would wait for one fails."""
    losses = checks.LossRecord(torch.device("meta"), position.Position())
    for _ in range(200):
        losses.note(torch.zeros((), device="meta"))


@pytest.mark.parametrize(
    ("values", "culprit"),
    [
        ({"a": torch.zeros(3), "b": torch.tensor([1.0, float("nan")])}, "b"),
        ({"a": torch.tensor([[1.0, -float("inf")]]).half()}, "a"),
        ({"a": torch.tensor([complex(0, float("inf"))])}, "a"),
        ({"a": torch.full((9,), 6e4).half(), "b": torch.full((9,), 3e38).bfloat16()}, None),
        ({"a": torch.zeros(0), "b": torch.ones(2, dtype=torch.int64), "c": 1}, None),
        ({"a": torch.full((9,), 1.7e308, dtype=torch.float64)}, None),
    ],
)
def test_what_is_not_finite_is_found(values, culprit):
    largest = checks.largest(values)
    assert next((name for name in largest if not math.isfinite(largest[name])), None) == culprit


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ("ddp", "nan"),
        ("ddp_fork", "gradient"),
        *(
            pytest.param(strategy, what, marks=[pytest.mark.slow, *needs, *also])
            for strategy, needs in [
                ("ddp_zero1", []),
                ("fsdp", []),
                ("deepspeed", [pytest.mark.needs("deepspeed")]),
                ("ddp_sharded", [pytest.mark.needs("fairscale")]),
            ]
            for what, also in (("nan", []), ("gradient", [pytest.mark.exhaustive]))
        ),
    ],
)
def test_all_ranks_tell_of_the_rank_that_was_first(tmp_path, strategy, what):
    arguments = [
        *("-m", PACKAGE, "fit", "--model", "nonfinite_subject.Diverges"),
        *("--model.rank", "1", "--model.what", what, "--data", "nonfinite_subject.Data"),
        *("--trainer.strategy", strategy, "--trainer.devices", "2", "--trainer.accelerator", "cpu"),
        *("--trainer.max_epochs", "1", "--trainer.checkpoint_every_n_steps", "2"),
        *("--trainer.default_root_dir", tmp_path, "--trainer.run_name", "run"),
        *("--trainer.loggers", "[]"),
    ]
    done = run(arguments, cwd=tmp_path, extra=at_root())
    if what == "gradient" and strategy == "deepspeed":
        assert done.returncode == 0, done.stderr  # it skips such a step
        return
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    where = "on rank 1" if what == "nan" else "on rank 0"  # gradients are averaged
    told = "the loss of step 4 is" if what == "nan" else "parameter linear."
    assert told in line
    assert where in line or strategy == "fsdp"
    assert "the last good checkpoint is " in line
    assert saved(tmp_path) == ["step-00000002"]
