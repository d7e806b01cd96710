"""Callbacks: when they are called, what they can do to a run, and what a resume restores."""

import json
import math
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import numpy as np
import pytest
import torch
from my_project_trainer import callbacks as all_callbacks
from my_project_trainer.callbacks import BestCheckpoint, EarlyStopping, StochasticWeightAveraging
from tests.project import succeed

import callback_subject as subject
from fitting import quiet


def fit(model: trainer.TrainingModule, *callbacks: Any, **options: Any) -> trainer.Trainer:
    made = quiet(callbacks=callbacks, **options)
    with made.building():
        made.fit(model)
    return made


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def test_hooks_are_called_in_this_order() -> None:
    records = subject.Records()
    calls: list[str] = []

    class Model(subject.Net):
        def on_after_optimizer_step(self) -> None:
            calls.append(f"{self.global_step} {records.calls[-1]}")

        def on_fit_end(self) -> None:
            calls.append("end")

    fit(Model(), records, max_steps=3, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert records.calls == [
        "fit_start 0",
        "epoch_start 0",
        *("batch_start 0 0", "batch_end 0 0", "batch_start 1 0", "before_step 0"),
        *("after_step 1", "batch_end 1 1"),
        *("batch_start 2 1", "batch_end 2 1", "batch_start 3 1", "before_step 1"),
        *("after_step 2", "batch_end 3 2", "epoch_end 2", "validation_start 2", "validation_end 2"),
        "epoch_start 2",
        *("batch_start 0 2", "batch_end 0 2", "batch_start 1 2", "before_step 2"),
        *("after_step 3", "batch_end 1 3"),
        *("validation_start 3", "validation_end 3", "fit_end 3"),
    ]
    assert calls == ["1 after_step 1", "2 after_step 2", "3 after_step 3", "end"]


def test_a_resume_with_a_stateful_callback_is_exact() -> None:
    uninterrupted, half, rest = (subject.Net() for _ in range(3))
    for model in (half, rest):
        model.load_state_dict(uninterrupted.state_dict())
    fit(uninterrupted, subject.Average(), max_steps=7, run_name="whole")
    fit(half, subject.Average(), max_steps=3, run_name="half")
    average = subject.Average()
    fit(rest, average, max_steps=7, run_name="half", resume="auto")
    assert average.steps == 7
    assert torch.equal(rest.layer.weight, uninterrupted.layer.weight)


def test_states_without_a_callback_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    fit(subject.Net(), subject.Average(), max_steps=1, run_name="run")
    fit(subject.Net(), max_steps=2, resume="auto", run_name="run")
    assert "note: the checkpoint has the state of Average, which is not" in capsys.readouterr().err


def test_early_stopping_stops_and_counts_on_after_a_resume() -> None:
    stopping = EarlyStopping("val_loss", patience=3)
    made = fit(subject.Net(rises_after=4), stopping, max_epochs=20, run_name="run")
    # Epochs 0 to 3 improve; 4, 5 and 6 do not.
    assert (made.global_step, stopping.waited) == (7 * 4, 3)
    made = fit(subject.Net(rises_after=4), EarlyStopping("val_loss"), max_epochs=6, run_name="half")
    assert made.global_step == 6 * 4
    more = {"max_epochs": 20, "run_name": "half", "resume": "auto"}
    made = fit(subject.Net(rises_after=4), EarlyStopping("val_loss"), **more)
    assert made.global_step == 7 * 4


def test_the_best_checkpoints_are_kept() -> None:
    best = BestCheckpoint("val_loss", k=2)
    made = fit(subject.Net(rises_after=3), best, max_epochs=6, run_name="run")
    assert [step for _, step in best.kept] == [12, 8]
    folder = Path("runs/run/checkpoints")
    names = {path.name for path in (folder / "best").iterdir()}
    assert names == {"step-00000012", "step-00000008"}
    assert {path.name for path in folder.glob("step-*")} == {"step-00000024", "step-00000020"}
    assert Path("runs/run/best").resolve().name == "step-00000012"
    expected = {"val_loss": pytest.approx(best.kept[0][0], abs=1e-12)}
    assert made.validate(subject.Net(), checkpoint="runs/run/best") == expected
    resumed = BestCheckpoint("val_loss", k=2)
    fit(subject.Net(rises_after=3), resumed, max_epochs=7, run_name="run", resume="auto")
    assert resumed.kept == best.kept
    assert {path.name for path in (folder / "best").iterdir()} == names


class Scripted(subject.Net):
    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses = losses

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses[self.current_epoch])


def test_nan_is_never_the_best_and_best_is_not_the_newest() -> None:
    best, stopping = BestCheckpoint("val_loss", k=4), EarlyStopping("val_loss", patience=9)
    options: Any = {"max_epochs": 5, "sanity_check": 0, "run_name": "run"}
    fit(Scripted(math.nan, 3.0, 1.0, math.nan, 2.0), best, stopping, **options)
    assert best.kept == [(1.0, 12), (2.0, 20), (3.0, 8)]
    assert Path("runs/run/best").resolve().name == "step-00000012"
    assert (stopping.best, stopping.waited) == (1.0, 2)
    assert not stopping.is_better(math.nan, None)
    assert not stopping.is_better(math.nan, math.nan)
    assert stopping.is_better(5.0, math.nan)


@pytest.mark.parametrize(
    ("losses", "than"), [((math.nan, math.nan), ""), ((2.5, math.nan, math.nan), " on 2.5")]
)
def test_early_stopping_says_that_a_value_is_nan(capsys, losses, than):
    stopping = EarlyStopping("val_loss", patience=2)
    fit(Scripted(*losses), stopping, max_epochs=9, sanity_check=0, run_name="run")
    line = f"val_loss is nan: it has not improved{than} for 2 validations"
    assert line in "".join(capsys.readouterr())


class Counts(trainer.Callback):
    def __init__(self, count: int = 0, name: str | None = None) -> None:
        self.count, self.name = count, name

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def test_two_callbacks_of_one_class_have_their_own_states() -> None:
    fit(subject.Net(), Counts(100, "a"), Counts(200, "b"), max_steps=2, run_name="run")
    first, second = Counts(name="a"), Counts(name="b")
    fit(subject.Net(), second, first, max_steps=3, run_name="run", resume="auto")
    assert (first.count, second.count) == (103, 203)


def test_a_run_that_a_callback_stops_can_be_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    uninterrupted, rest = subject.Net(), subject.Net()
    rest.load_state_dict(uninterrupted.state_dict())
    fit(uninterrupted, max_epochs=2, run_name="whole")
    options = {"max_epochs": 2, "run_name": "run"}
    assert fit(rest, subject.Stops(at=3), **options).global_step == 3
    assert "note: stop requested in step 3: enough" in capsys.readouterr().err
    assert fit(rest, resume="auto", **options).global_step == 8
    assert torch.equal(rest.layer.weight, uninterrupted.layer.weight)


def test_ranks_decide_together(tmp_path: Path) -> None:
    succeed(["-m", "callback_subject", tmp_path])
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    # Two steps an epoch. Rank 1 asked in step 7; the ranks agree then, or at the epoch's end.
    assert first["step"] in (7, 8)
    assert first["kept"] == [[-float(first["step"]), first["step"]]]
    assert "stop requested in step 7: enough" in (tmp_path / "run/logs/rank-1.log").read_text()


def test_on_exception_is_told_and_cannot_hide_the_error() -> None:
    fails = subject.Fails()
    with pytest.raises(ArithmeticError, match="planted") as caught:
        fit(subject.Net(), fails, max_steps=2)
    assert fails.told == ["planted"]
    assert caught.value.__notes__ == ["on_exception also raised OSError: no disk"]


class _Foreign(trainer.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None: ...
    def on_validation_ende_start(self, trainer: Any, module: Any) -> None: ...
    def on_train_batch_end(self, trainer: Any, module: Any, batch: Any, i: int) -> None:  # type: ignore[override]
        """Without the outputs."""


BY_CLASS = {"class_path": "EarlyStopping"}
UNKNOWN = "is no built-in callback and no class path"


def test_arguments_of_wrong_types_are_all_named() -> None:
    wrong: list[tuple[Any, list[Any], list[str]]] = [
        (EarlyStopping, ["v", "3", "mx"], ["patience='3': expected int", "mode='mx': exp"]),
        (EarlyStopping, ["v", 2.5], ["patience=2.5: expected int"]),
        (BestCheckpoint, [3], ["monitor=3: expected str"]),
        (all_callbacks.EMA, ["0.9"], ["decay='0.9': expected float"]),
        (StochasticWeightAveraging, [None], ["start_epoch=None: expected int"]),
        (all_callbacks.Profile, [1, 1, 1, 1, 0], ["ranks=0: expected Sequence[int] | None"]),
        (all_callbacks.SystemMonitor, ["10"], ["every_n_seconds='10': expected float"]),
    ]
    for callback, arguments, lines in wrong:
        with pytest.raises(trainer.ConfigurationError) as caught:
            callback(*arguments)
        for problem, line in zip(caught.value.problems, lines, strict=True):
            assert problem.startswith(f"{callback.__name__}: {line}")
    assert EarlyStopping("v", patience=np.int64(3), min_delta=0).patience == 3


@pytest.mark.parametrize(
    ("callbacks", "lines"),
    [
        (["StopOnNaN"], [f"callbacks[0]='StopOnNaN' {UNKNOWN}; known: Best"]),
        (["EarlyStop"], [f"callbacks[0]='EarlyStop' {UNKNOWN}"]),
        (["os.path"], ["callbacks[0]='os.path' is not a Callback"]),
        (["no_such_module.Callback"], ["callbacks[0]='no_such_module.Callback': No module named"]),
        ("EarlyStopping", ["callbacks='EarlyStopping': give a list of callbacks, or of class"]),
        ([3], ["callbacks[0]=3: give a Callback, its class path, or class_path and init_args"]),
        (
            [{**BY_CLASS, "init_args": {"monitr": "x", "patience": "many"}}],
            [
                "callbacks[0].monitr: there is no such option; did you mean 'monitor'",
                "callbacks[0].patience='many': expected int",
                "callbacks[0].monitor: not given, and it has no default",
            ],
        ),
        ([{**BY_CLASS, "args": {}}], ["callbacks[0] has no 'args'"]),
        (
            [{"class_path": "BestCheckpoint", "init_args": {"monitor": "x", "k": 0}}],
            ["BestCheckpoint: k=0: give at least 1"],
        ),
        (
            [_Foreign()],
            [
                "_Foreign.on_train_start would not be called: it is no hook; use on_fit_start",
                "_Foreign.on_validation_ende_start would not be called: it is no hook",
                "_Foreign.on_train_batch_end takes (trainer: ",
            ],
        ),
    ],
)
def test_mistakes_are_said_before_anything_starts(callbacks: Any, lines: list[str]) -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", callbacks=callbacks)
    assert len(caught.value.problems) == len(lines)
    for problem, line in zip(caught.value.problems, lines, strict=True):
        assert problem.startswith(line)


class OwnAverage(trainer.Callback):
    needs = ("parameter_averaging",)


def test_validations_use_one_average() -> None:
    swa = StochasticWeightAveraging(start_epoch=0)
    for callbacks in (["EMA", swa], ["EMA", OwnAverage()]):
        with pytest.raises(trainer.ConfigurationError, match="validations use one average"):
            trainer.Trainer(callbacks=callbacks)


def test_callbacks_by_class_path_are_created() -> None:
    callback = {"class_path": "callback_subject.Stops", "init_args": {"at": 2}}
    assert fit(subject.Net(), callback, max_steps=5).global_step == 2
