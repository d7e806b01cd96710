"""Limits of a run: batches, time, ``fast_dev_run``, ``overfit_batches`` and ``sanity_check``."""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.callbacks import BestCheckpoint
from my_project_trainer.checkpoint import Checkpoint
from my_project_trainer.loop import evaluation
from my_project_trainer.options import Options
from torch.utils.data import DataLoader

import control_subject as subject
import fitting
from tests import project


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def make(**options: Any) -> trainer.Trainer:
    defaults = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "sanity_check": 0}
    return trainer.Trainer(**defaults | options)


def fit(model: trainer.TrainingModule, **options: Any) -> trainer.Trainer:
    made = make(**options)
    made.fit(model)
    return made


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def logged(name: str) -> list[tuple[int, int, str, float]]:
    return fitting.rows(Path("runs", name))


def test_epochs_end_after_the_limit() -> None:
    full, limited = subject.Net(), subject.Net()
    fit(full, max_epochs=2, limit_val_batches=0)
    limits = {"limit_train_batches": 4, "limit_val_batches": 3}
    made = fit(limited, max_epochs=2, accumulate_grad_batches=2, run_name="run", **limits)
    # Of 10 batches; the order of samples is that of whole epochs.
    assert limited.seen["training"] == full.seen["training"][:4] + full.seen["training"][10:14]
    assert limited.seen["validation"] == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert full.seen["validation"] == []
    assert (made.global_step, limited.total_steps) == (4, 4)
    assert made.metrics["count"] == 12
    steps = [(step, epoch) for step, epoch, name, _ in logged("run") if name == "loss_step"]
    assert steps == [(1, 0), (4, 1)]


def test_each_nth_step_validates_and_saves_also_at_the_end_of_an_epoch() -> None:
    model = subject.Net(batch_size=8)  # 5 steps an epoch: 10 ends one, 15 ends the run
    names = ("check_val_every_n_epoch", "checkpoint_every_n_epochs", "keep_checkpoints")
    every = {"val_every_n_steps": 2, "checkpoint_every_n_steps": 2, **dict.fromkeys(names, 9)}
    fit(model, max_epochs=3, run_name="run", **every)
    expected = [2, 4, 6, 8, 10, 12, 14, 15]
    assert [step for step, _, name, _ in logged("run") if name == "val_loss"] == expected
    saved = sorted(path.name for path in Path("runs/run/checkpoints").iterdir())
    assert saved == [f"step-{step:08}" for step in expected]


def test_a_limit_holds_for_a_loader_that_drops_its_last_batch() -> None:
    model = subject.Net()
    data = model.train_dataloader().dataset
    loader = DataLoader(data, batch_size=12, drop_last=True)  # 3 batches of 40 samples
    made = make(max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    made.fit(model, loader)
    assert (made.global_step, len(flat(model.seen["training"]))) == (2, 24)


def test_a_resume_within_a_limited_epoch_is_exact() -> None:
    uninterrupted, half, rest = subject.Net(True), subject.Net(True), subject.Net(True)
    options = {"limit_train_batches": 4, "limit_val_batches": 1}
    for model, limit, more in (
        (uninterrupted, 11, {"run_name": "whole"}),
        (half, 6, {"run_name": "run"}),
        (rest, 11, {"run_name": "run", "resume": "auto"}),
    ):
        torch.manual_seed(0)
        fit(model, max_steps=limit, **options, **more)
    assert half.seen["training"] + rest.seen["training"] == uninterrupted.seen["training"]
    assert_same(uninterrupted, rest)


def test_fractions_are_of_steps_and_of_batches(capsys: Any) -> None:
    model = subject.Net()
    options = {"limit_train_batches": 0.3, "limit_val_batches": 0.5, "limit_test_batches": 0.99}
    made = make(**options, limit_predict_batches=2, max_epochs=1, accumulate_grad_batches=2)
    made.fit(model)
    # 5 steps of 2 batches, and 6 batches.
    assert (made.global_step, model.total_steps, len(model.seen["training"])) == (1, 1, 2)
    assert model.seen["validation"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    made.test(model)
    assert flat(model.seen["test"]) == list(range(20))
    assert torch.cat(made.predict(model)).tolist() == list(range(8))
    told = [line for line in capsys.readouterr().err.splitlines() if "limited by" in line]
    assert told == [
        "note: limited by limit_train_batches=0.3, limit_val_batches=0.5",
        "note: limited by limit_test_batches=0.99",
        "note: limited by limit_predict_batches=2",
    ]
    with pytest.raises(trainer.UserError, match=r"limit_train_batches=0.1: .* of 5 is less than 1"):
        fit(subject.Net(), limit_train_batches=0.1, max_epochs=1, accumulate_grad_batches=2)


def test_limits_of_loaders_that_are_read_as_they_are() -> None:
    loader = list(subject.Net().train_dataloader())
    model = subject.Net()
    made = make(max_epochs=2, limit_train_batches=4, limit_val_batches=0.5, sanity_check=1)
    made.fit(model, loader, val_dataloader=loader[:2])
    ids = [batch[0].tolist() for batch in loader]
    assert model.seen["training"] == 2 * ids[:4]
    assert model.seen["validation"] == 2 * ids[:1]
    endless = make(max_epochs=1, limit_train_batches=0.5)
    with pytest.raises(trainer.UserError, match=r"limit_train_batches=0\.5: the loader has no"):
        endless.fit(subject.Net(), _Endless())


class _Endless:
    def __iter__(self) -> Any:
        while True:
            yield from subject.Net().train_dataloader()


def test_overfit_batches_repeat_and_are_validated() -> None:
    model, usual = subject.Net(), subject.Net()
    made = fit(model, max_epochs=3, overfit_batches=2)
    fit(usual, max_epochs=1, limit_train_batches=2)
    assert model.seen["training"] == 3 * usual.seen["training"]
    assert model.seen["validation"] == model.seen["training"]
    assert made.metrics["count"] == 8
    with pytest.raises(trainer.UserError, match="overfit_batches=2: the training loader is read"):
        made.fit(subject.Net(), list(model.train_dataloader()))


def test_max_time_ends_a_fit_and_counts_earlier_attempts(capsys):
    uninterrupted, model = subject.Net(), subject.Net()
    fit(uninterrupted, max_epochs=2, run_name="whole")
    options = {"max_epochs": 2, "run_name": "run", "resume": "auto"}
    passes = [subject.HourPasses(after=3)]
    made = fit(model, max_time={"minutes": 30}, callbacks=passes, **options)
    assert made.global_step == 3
    assert len(model.seen["validation"]) == 6  # validated
    assert "training stops after step 3: max_time" in capsys.readouterr().err
    saved = Checkpoint(Path("runs/run/checkpoints/step-00000003")).state()["position"]
    assert 3600 <= saved["seconds"] < 4200
    assert fit(model, max_time="00:01:00:00", **options).global_step == 3
    assert fit(model, max_time="01:00:00:00", **options).global_step == 20
    assert_same(uninterrupted, model)


def test_max_time_alone_is_an_end() -> None:
    passes = [subject.HourPasses(after=13)]
    assert fit(subject.Net(), max_time={"hours": 0.5}, callbacks=passes).global_step == 13


def test_forms_of_max_time() -> None:
    assert Options(max_time="01:02:03:04").max_seconds == 86400 + 2 * 3600 + 3 * 60 + 4
    assert Options(max_time={"days": 1, "minutes": 1.5}).max_seconds == 86490
    assert Options().max_seconds is None


def test_fast_dev_run_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = subject.Net()
    options = {"max_epochs": 9, "run_name": "run", "resume": "auto", "accumulate_grad_batches": 2}
    made = fit(model, fast_dev_run=2, callbacks=[BestCheckpoint("val_loss")], **options)
    assert (made.global_step, model.total_steps, len(model.seen["training"])) == (2, 2, 4)
    assert model.seen["validation"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert capsys.readouterr().err.splitlines()[0] == (
        "note: fast_dev_run=2: 2 optimizer steps, and 2 batches of validation, test or prediction; "
        "no checkpoints, no loggers; not used: max_epochs=9, resume='auto', run_name='run'"
    )
    assert made.run_directory is not None
    names = {path.name for path in made.run_directory.iterdir()}
    assert not names & {"checkpoints", "metrics.csv", "best"}
    assert not Path("runs/run").exists()
    made.test(model)
    assert model.seen["test"] == model.seen["validation"]


class Calls(trainer.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.steps.append(trainer.global_step)


def test_a_sanity_check_changes_nothing() -> None:
    without, checked = subject.Net(is_random=True), subject.Net(is_random=True)
    calls = Calls()
    for model, batches, callbacks in ((without, 0, []), (checked, 2, [calls])):
        torch.manual_seed(0)
        options: dict[str, Any] = {"callbacks": callbacks, "run_name": str(batches)}
        fit(model, max_epochs=2, sanity_check=batches, log_every_n_steps=1, **options)
    first = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert checked.seen["validation"] == first + without.seen["validation"]
    assert checked.seen["training"] == without.seen["training"]
    assert_same(without, checked)
    assert checked.validated == 12
    assert calls.steps == [10, 20]
    assert logged("0") == logged("2")
    resumed = subject.Net(is_random=True)
    fit(resumed, max_epochs=3, sanity_check=2, run_name="2", resume="auto")
    # No check: the checkpoint of epoch 2 was saved before its validation, which is repeated.
    assert resumed.seen["validation"] == without.seen["validation"]


def test_a_sanity_check_finds_a_broken_validation_before_the_first_step() -> None:
    class Broken(subject.Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise LookupError("planted")

    model = Broken()
    with pytest.raises(LookupError, match="planted") as caught:
        trainer.Trainer(accelerator="cpu", max_epochs=1, enable_progress_bar=False).fit(model)
    assert model.seen["training"] == []
    assert "see sanity_check" in caught.value.__notes__[0]
    with pytest.raises(trainer.ConfigurationError, match="are two spellings of one option"):
        make(num_sanity_val_steps=0, sanity_check=2)
    fit(Broken(), max_epochs=1, limit_val_batches=0, sanity_check=1)


SELECTS = "each select batches; give only one"
MAX_TIME = "give 'DD:HH:MM:SS', or one or more of weeks"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"limit_train_batches": 0}, "limit_train_batches=0: give a number of batches, or a"),
        ({"limit_test_batches": 1.5}, "limit_test_batches=1.5: give a number of batches, or a"),
        (
            {"limit_train_batches": 3, "accumulate_grad_batches": 2},
            "limit_train_batches=3: an optimizer step takes accumulate_grad_batches=2 batches",
        ),
        (
            {"overfit_batches": 2, "limit_train_batches": 4, "limit_val_batches": 0},
            f"overfit_batches=2 and limit_train_batches=4 {SELECTS}\n"
            f"overfit_batches=2 and limit_val_batches=0 {SELECTS}",
        ),
        (
            {"overfit_batches": 0.5, "fast_dev_run": True},
            f"fast_dev_run=1 and overfit_batches=0.5 {SELECTS}",
        ),
        ({"fast_dev_run": -1}, "fast_dev_run=-1: expected bool | int >= 0"),
        ({"sanity_check": -1}, "sanity_check=-1: expected int >= 0"),
        ({"num_sanity_val_steps": -1}, "sanity_check=-1: expected int >= 0"),
        ({"max_time": "1:30"}, f"max_time='1:30': {MAX_TIME}"),
        ({"max_time": {"hour": 1}}, f"max_time={{'hour': 1}}: {MAX_TIME}"),
        ({"max_time": {"hours": "1"}}, "max_time={'hours': '1'}: expected str | timedelta"),
        ({"max_time": {"days": 1e300}}, f"max_time={{'days': 1e+300}}: {MAX_TIME}"),
        ({"max_time": "00:00:00:00"}, f"max_time='00:00:00:00': {MAX_TIME}"),
    ],
)
def test_contradictions_are_refused_at_once(options: dict[str, Any], line: str) -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", **options)
    for problem, expected in zip(caught.value.problems, line.split("\n"), strict=True):
        assert problem.startswith(expected)


class Fails(trainer.Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            raise LookupError("planted")


def test_checkpoints_of_some_epochs_resume_to_the_last_bit() -> None:
    def train(**overrides: Any) -> subject.Net:
        torch.manual_seed(0)
        model = subject.Net(is_random=True, batch_size=20)
        shared: dict[str, Any] = {"max_epochs": 3, "loggers": ["csv"]}
        fit(model, **shared | {"keep_checkpoints": 9} | overrides)
        return model

    uninterrupted = train(run_name="whole")
    options: dict[str, Any] = {"checkpoint_every_n_epochs": 2, "run_name": "run"}
    train(**options, max_epochs=1)
    assert_same(uninterrupted, train(**options, resume="auto"))
    assert logged("run") == logged("whole")
    assert saved("run") == [2, 4, 6]
    options |= {"run_name": "failed", "callbacks": [BestCheckpoint("val_loss")]}
    with pytest.raises(LookupError, match="planted"):
        train(**options | {"callbacks": [*options["callbacks"], Fails()]})
    assert saved("failed") == [2]  # by BestCheckpoint, after the validation
    assert_same(uninterrupted, train(**options, resume="auto"))
    assert logged("failed") == logged("whole")


def saved(name: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path("runs", name, "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_two_processes_read_the_same_samples(tmp_path: Path) -> None:
    ended = project.run(["-m", "control_subject", tmp_path], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    one = subject.Net(batch_size=4)
    options = {"max_epochs": 2, "global_batch_size": 16} | subject.LIMITS
    made = make(**options)
    made.fit(one, one.train_dataloader(), subject.named_loaders(one))
    rate = make(**options).find_learning_rate(subject.Net(), **subject.SWEEP)
    assert one.gathered == [[0, 0], [0]]
    trained = sorted(flat(one.seen["training"]))
    assert len(trained) == 2 * 32  # 4 micro-batches of 8
    for name in subject.RUNS:
        ranks = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
        assert ranks[0]["steps"] == ranks[1]["steps"]
        for record in ranks:
            assert record["gathered"][:3] == [[0, 0], [1, 2], [0, 1]]
            reason = "shapes differ between ranks (0: (0,)"
            assert record["gathered"][3].startswith(f"all_gather: {reason}")
        # 5 batches of 4 of one loader, on any number of processes, and one sample of the other.
        assert ranks[0]["metrics"]["count/many"] == 20
        assert ranks[1]["metrics"]["count/one"] == 1
        if name == "ddp":
            assert [rank["rate"] for rank in ranks] == [rate, rate]
        if name == "time":  # of which only rank 1 knows that it is over
            assert 2 <= ranks[0]["steps"] < 1000
            continue
        if name == "stop":
            assert ranks[0]["steps"] == 4
            continue
        assert ranks[0]["steps"] == made.global_step == 4
        if name != "pipeline":  # whose processes read the same batches
            assert sorted(flat(flat(rank["training"] for rank in ranks))) == trained
        if name != "server":  # which steps with each worker's gradient
            assert ranks[0]["metrics"] == pytest.approx(made.metrics, abs=1e-5)


def test_a_sanity_check_skips_buffers_of_other_stages() -> None:
    module = torch.nn.BatchNorm1d(3)
    freed = torch.full((), float("nan")).expand(3)  # as a pipeline frees what is not its own
    module.running_mean = freed
    with evaluation._same_buffers(module):
        module.running_var.fill_(7)
    assert torch.equal(module.running_var, torch.ones(3))
    assert module.running_mean is freed
