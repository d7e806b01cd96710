"""The options that checks read are the trainer's keywords; checking changes nothing."""

import inspect
import os
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.launch import idle_gpus, start
from my_project_trainer.options import Options, reading, values
from my_project_trainer.run import placement


def test_the_trainer_s_keywords_are_the_fields_with_their_defaults() -> None:
    parameters = inspect.signature(trainer.Trainer).parameters
    assert list(parameters) == [field.name for field in fields(Options)]
    assert all(parameters[field.name].default == field.default for field in fields(Options))


ONLY_FIT = {
    *("max_epochs", "max_steps", "max_time", "limit_train_batches", "overfit_batches"),
    *("global_batch_size", "accumulate_grad_batches", "sync_batchnorm"),
    *("gradient_clip_val", "gradient_clip_algorithm", "learning_rate_scaling"),
    *("reference_batch_size", "learning_rate_warmup_steps", "nonfinite_loss", "sanity_check"),
    *("compile", "activation_checkpointing", "callbacks", "loggers", "log_every_n_steps"),
    *("log_gradient_norm", "record_hashes", "peak_flops", "val_every_n_steps", "overwrite"),
    *("check_val_every_n_epoch", "checkpoint_every_n_steps", "checkpoint_every_n_epochs"),
    *("keep_checkpoints", "checkpoint_weights", "async_checkpoints", "resume", "resume_options"),
    *("weights", "weights_strict"),
}
OF_STAGES = {f"limit_{stage}_batches" for stage in ("val", "test", "predict")}


def test_each_option_is_used_by_commands_that_are_known() -> None:
    names = [field.name for field in fields(Options)]
    assert sorted(names) == sorted([*ONLY_FIT, *reading.USED_IN_EVALUATION, *OF_STAGES])
    for command, stage in (("validate", "val"), ("test", "test"), ("predict", "predict")):
        unused = ONLY_FIT | OF_STAGES - {f"limit_{stage}_batches"}
        assert {*reading.unused(command, names)} == unused
    assert reading.unused("fit", names) == ["limit_test_batches", "limit_predict_batches"]
    assert reading.unused("find_batch_size", names) == []


def test_options_cannot_be_changed_and_know_no_older_spelling() -> None:
    made = trainer.Trainer(gpus=0, precision=32, logger=False, max_steps=1)._plan.options  # type: ignore[call-arg]
    assert (made.accelerator, made.devices, made.precision, made.loggers) == (
        "cpu",
        1,
        "32-true",
        (),
    )
    with pytest.raises(FrozenInstanceError):
        made.max_steps = 2


def test_unknown_keywords_are_refused_together() -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(ma=1, max_nb_epochs=2)  # type: ignore[call-arg]
    first, second = caught.value.problems
    assert first.startswith("ma: Trainer has no such argument")
    advice = "did you mean 'max_epochs' or 'max_steps'?"
    assert second == f"max_nb_epochs: Trainer has no such argument; {advice}"
    with pytest.raises(TypeError, match="positional"):
        trainer.Trainer("cpu")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "devices", "precision"),
    [
        ({"devices": "2"}, 2, "32-true"),
        ({"devices": "-1"}, 1, "32-true"),
        ({"devices": "1"}, 1, "32-true"),
        ({"devices": "0,"}, 1, "32-true"),
        ({"devices": "1, 3"}, 2, "32-true"),
        ({"precision": "16"}, 1, "16-mixed"),
        ({"precision": 16}, 1, "16-mixed"),
    ],
)
def test_numbers_may_be_given_as_text_where_text_is_accepted(options, devices, precision):
    plan = trainer.Trainer(accelerator="cpu", max_steps=1, **options)._plan
    assert (len(plan.node_devices), plan.options.precision) == (devices, precision)


def test_auto_with_options_is_ddp_on_one_device_too() -> None:
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 1}
    assert trainer.Trainer(**options)._plan.strategy_name == "single_device"
    plan = trainer.Trainer(**options, strategy_options={"timeout_seconds": 700.0})._plan
    assert (plan.strategy_name, vars(plan.strategy)["timeout_seconds"]) == ("ddp", 700.0)


def test_text_is_no_number_where_only_numbers_are_accepted() -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", devices="0", max_steps="2", seed="2")
    first, second, third = caught.value.problems
    assert (first, second) == (
        "max_steps='2': expected int >= 1 | None",
        "seed='2': expected int >= 0",
    )
    assert third.startswith("devices='0' may mean no device or device 0")


def test_the_seed_is_that_of_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reading.SEEDED, "seed", 1)
    trainer.seed_everything(42)
    before = torch.nn.Linear(3, 3).weight
    made = [trainer.Trainer(accelerator="cpu", **options) for options in ({"seed": 7}, {})]
    assert [made_trainer._plan.options.seed for made_trainer in made] == [7, 42]
    assert torch.equal(before, torch.nn.Linear(3, 3).weight)  # created after the trainer


def test_copies_of_the_command_are_told_which_gpus_were_chosen(monkeypatch, tmp_path):
    monkeypatch.delenv("TRAINER_GPUS", raising=False)
    monkeypatch.setenv("TRAINER_OUTCOME", str(tmp_path / "outcome"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(idle_gpus, "read_gpus", list)
    monkeypatch.setattr(idle_gpus, "choose_idle", lambda found, count: [3, 1])
    before = dict(os.environ)
    made = trainer.Trainer(accelerator="gpu", devices=2, auto_select_gpus=True, max_steps=1)
    assert dict(os.environ) == before  # until it starts them
    assert [device.index for device in made._plan.node_devices] == [3, 1]
    told = []

    def started(*_: Any) -> None:
        told.append(os.environ["TRAINER_GPUS"])
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "supervise_copies", started)
    with pytest.raises(KeyboardInterrupt):
        made.predict(_Predicts())
    assert told == ["3,1"]
    monkeypatch.setattr(idle_gpus, "choose_idle", None)  # a rank does not choose again
    monkeypatch.setattr(placement.reports, "is_reported", lambda: True)
    rank = trainer.Trainer(accelerator="gpu", devices=2, auto_select_gpus=True, max_steps=1)
    assert [device.index for device in rank._plan.node_devices] == [3, 1]


def test_a_second_trainer_of_a_script_names_the_one_that_started_it(monkeypatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(placement.reports, "is_reported", lambda: True)
    with pytest.raises(trainer.UserError, match="the Trainer of this script with 2 processes did"):
        trainer.Trainer(accelerator="cpu", devices=1, max_steps=1)


class _Predicts(trainer.TrainingModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def test_a_path_that_exists_is_not_expanded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a$b").mkdir()
    assert values.expand_path("weights", tmp_path / "a$b") == f"{tmp_path}/a$b"
    monkeypatch.setenv("b", "c")
    assert values.expand_path("weights", "a$b/d") == "ac/d"
    (tmp_path / "~").mkdir()
    assert values.expand_path("weights", "~") == str(Path.home())
