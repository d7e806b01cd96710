"""Loggers that users write: what they are told, refusals, failures, and resumes."""

import json
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
from my_project_trainer.cli import configuration
from my_project_trainer.launch import output

import callback_subject
import logger_subject as subject
from fitting import quiet

pytestmark = pytest.mark.usefixtures("apart")

LINES = {"class_path": "logger_subject.Lines"}


def fit(loggers: Any, **options: Any) -> trainer.Trainer:
    made = quiet(loggers=loggers, **{"max_steps": 3, "log_every_n_steps": 1, **options})
    made.fit(callback_subject.Net())
    return made


def test_names_class_paths_and_objects_stand_in_one_list() -> None:
    mine = subject.Bare()
    second = {**LINES, "init_args": {"prefix": "my "}, "name": "second"}
    made = fit(["csv", LINES["class_path"], second, mine], run_name="run")
    assert made.run_directory is not None
    rows = (made.run_directory / "metrics.csv").read_text().splitlines()[1:]
    names = [row.split(",")[:3] for row in rows]
    assert [line.split() for line in subject.lines(made.run_directory)] == names
    second_lines = [line.split(" ", 2) for line in subject.lines(made.run_directory, "second")]
    assert second_lines == [[step, epoch, f"my {name}"] for step, epoch, name in names]
    kept = [
        [str(step), str(epoch), name, repr(value)]
        for step, epoch, values in mine.kept
        for name, value in values.items()
        if not name.startswith("speed/")
    ]
    assert kept == [row.split(",") for row in rows]
    assert {(step, epoch) for step, epoch, _ in mine.kept} == {(1, 0), (2, 0), (3, 0)}


def test_what_a_logger_is_told_of_a_run() -> None:
    made = fit([{**LINES, "init_args": {"api_key": "S", "prefix": "x"}}], run_name="run")
    assert made.run_directory is not None
    assert (made.run_directory / "calls.txt").read_text() == "start run\nclose\n"
    told = json.loads((made.run_directory / "configuration.json").read_text())
    assert told["trainer"]["max_steps"] == 3
    assert told["trainer"]["loggers"] == [{**LINES, "init_args": {"api_key": "***", "prefix": "x"}}]
    logged_run = trainer.LoggedRun.of(Path("runs/a"), made._plan.options, "model: {token: S, n: 1}")
    assert (logged_run.name, logged_run.configuration) == ("a", {"model": {"token": "***", "n": 1}})


def test_a_resumed_logger_writes_no_step_twice() -> None:
    loggers = ["csv", LINES]
    made = fit(loggers, run_name="run", max_steps=6, checkpoint_every_n_steps=2)
    assert made.run_directory is not None
    log = made.run_directory / "Lines.txt"
    content = log.read_text()
    size = content.index("4 0 loss_epoch")  # the epoch is saved before its validation
    fit(loggers, run_name="run", max_steps=6, resume="runs/run/checkpoints/step-00000004")
    assert log.read_text() == content
    calls = (made.run_directory / "calls.txt").read_text().splitlines()
    assert calls == ["start run", "close", "start run", f"resume {size} 4", "close"]


@pytest.mark.parametrize("method", ["start", "write", "position", "resume", "close"])
def test_a_logger_that_raises_is_said_once_and_training_goes_on(method, capfd):
    fails, bare = subject.Fails(method), subject.Bare()
    if method == "resume":
        fit([fails, bare], run_name="run", max_steps=1)
    made = fit([fails, bare], run_name="run", resume="auto", checkpoint_every_n_steps=1)
    assert (made.global_step, fails.calls) == (3, 1)
    assert {step for step, _, _ in bare.kept} == {1, 2, 3}
    told = capfd.readouterr().err.splitlines()
    assert [line for line in told if not line.startswith("note: resumed from ")] == [
        "warning: logger 'Fails' is not used any more: it raised OSError: No space left on device: "
        "log"
    ]


UNKNOWN = "is no built-in logger and no class path"


@pytest.mark.parametrize(
    ("loggers", "line"),
    [
        ("csv", "loggers='csv': give a list of loggers, or of names"),
        ([5], "loggers[0]=5: give a Logger, its class path, or class_path and init_args"),
        (["cvs"], f"loggers[0]='cvs' {UNKNOWN}; did you mean 'csv'?"),
        (["neptune"], f"loggers[0]='neptune' {UNKNOWN}; known: csv, mlflow, tensorboard, wandb"),
        (["os.path"], "loggers[0]='os.path' is not a Logger"),
        (["csv", print], "loggers[1]=<built-in function print>: give a Logger, its class path, or"),
        (["csv", "csv"], "loggers: two are named 'csv'; give it once, or each its own name"),
        ([{"class_path": "csv", "name": "b"}], "loggers[0].name='b': it is always 'csv'"),
        ([LINES, LINES], "loggers: two are named 'Lines'; give it once, or each its own name"),
        ([{**LINES, "name": 5}], "loggers[0].name=5: expected str"),
        ([{**LINES, "args": {}}], "loggers[0] has no 'args'"),
        (["logger_subject.Mute"], "loggers[0]: Mute has no write(step, epoch, values)"),
        ([subject.Older()], "Older.write takes"),
        (
            [{**LINES, "init_args": {"prefx": "a"}}],
            "loggers[0].prefx: there is no such option; did you mean 'prefix'?",
        ),
    ],
)
def test_what_is_no_logger_is_refused(loggers: Any, line: str) -> None:
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", loggers=loggers)
    (problem,) = caught.value.problems
    assert problem.startswith(line)


def test_loggers_by_class_path_on_the_command_line() -> None:
    options = ["--trainer.loggers", json.dumps(["csv", {**LINES, "init_args": {"prefix": "a"}}])]
    words = ["--model", "callback_subject.Net", "--trainer.max_epochs", "1", *options]
    work = configuration.read_work("program", "fit", words)
    assert list(work.trainer._plan.loggers) == ["csv", "Lines"]
    wrong = '[{class_path: "logger_subjct.A"}]'
    with pytest.raises(trainer.ConfigurationError) as caught:
        configuration.read_work("program", "fit", [*words[:-1], wrong])
    line = "loggers[0]='logger_subjct.A': No module named 'logger_subjct'"
    assert caught.value.problems == [line]


def test_only_rank_0_calls_loggers_and_they_reach_started_processes() -> None:
    made = fit([subject.Lines("a ")], strategy="ddp_fork", devices=2, run_name="run")
    assert made.run_directory is not None
    assert (made.run_directory / "calls.txt").read_text() == "start run\nclose\n"
    steps = [line for line in subject.lines(made.run_directory) if line.endswith("a loss")]
    assert steps == ["1 0 a loss", "2 0 a loss", "3 1 a loss"]


class Gallery(trainer.Logger):
    def __init__(self) -> None:
        self.experiment: list[str] = []

    def write(self, step: int, epoch: int, values: Any) -> None:
        pass


class Shows(callback_subject.Net):
    def on_fit_start(self) -> None:
        self.logger.experiment.append("before there are loggers")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logger = self.logger if self.global_step else self.trainer.logger
        logger.experiment.append(f"step {self.global_step}")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.logger.experiment.add_text("no", "logger")


def test_a_module_shows_what_is_no_number_by_the_first_logger_that_can(capsys):
    model, gallery = Shows(), Gallery()
    quiet(loggers=["csv", gallery], max_steps=3).fit(model)
    assert gallery.experiment == ["step 0", "step 1", "step 2"]
    assert not hasattr(model, "logger")
    nothing = "note: trainer.logger does nothing here: loggers"
    only = f"{nothing} are open in a fit only, after on_fit_start"
    assert capsys.readouterr().err.splitlines() == [only]
    output.print_once.cache_clear()
    made = quiet(loggers=["csv"], max_steps=3)
    made.fit(model)
    made.test(model, model.train_dataloader())
    lines = capsys.readouterr().err.splitlines()
    assert lines == [only, f"{nothing} write numbers only: add 'tensorboard'"]
    model.logger = gallery  # an attribute of the module, such as one of the module logging
    quiet(loggers=(), max_steps=1).fit(model)
    assert gallery.experiment[3:] == ["before there are loggers"]
