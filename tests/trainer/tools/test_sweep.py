"""sweeps/sweep.py: studies of Optuna, and runs of the digits."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.errors import UserError
from tests.project import PATIENCE, ROOT, run, start

from fitting import logged
from preemption_subject import steps_of
from processes import assert_nothing_left, wait_for

pytestmark = pytest.mark.needs("optuna")


def exhaustive(test: Callable[..., None]) -> Callable[..., None]:
    """Each trial is a new interpreter; tests/slurm/test_sweep.py stops tasks of a study, too."""
    return pytest.mark.slow(pytest.mark.exhaustive(test))


SCRIPT = ROOT / "sweeps" / "sweep.py"
DIGITS = ["--config", str(ROOT / "configs" / "digits.yaml"), "--data.shift=0"]
SHORT = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.limit_train_batches=4"]
RATE: dict[str, Any] = {"low": "1e-4", "high": 0.1, "log": True}
WIDTH: dict[str, Any] = {"choices": [4, 8]}


def write(folder: Path, **changed: Any) -> Path:
    content = {"command": [*DIGITS, *SHORT], "metric": "val_loss", "direction": "minimize"}
    content |= {"trials": 2, "search": {"model.learning_rate": RATE, "model.width": WIDTH}}
    file = folder / "s.yaml"
    kept = {key: value for key, value in (content | changed).items() if value is not None}
    file.write_text(yaml.safe_dump(kept, sort_keys=False))
    return file


def sweep(folder: Path, *words: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    done = run([SCRIPT, "s.yaml", *words], cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def trials(folder: Path) -> Any:
    """Return the trials of the study, as Optuna reads them."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    log = JournalFileBackend(str(folder / "runs" / "sweep-s" / "study.log"))
    return optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(log)).trials


def last_value(folder: Path, trial: int, name: str) -> float:
    return logged(folder / "runs" / "sweep-s" / f"trial-{trial}", name)[-1]


def ended(folder: Path, trial: int) -> list[str]:
    attempts = run_directory.attempts(folder / "runs" / "sweep-s" / f"trial-{trial}")
    return [attempt.get("ended", "") for attempt in attempts]


@pytest.mark.slow
def test_the_best_trial_is_that_of_the_best_run(tmp_path: Path) -> None:
    write(tmp_path, trials=1)
    sweep(tmp_path)
    write(tmp_path, trials=2)
    summary, best, chosen = sweep(tmp_path).stdout.splitlines()
    assert summary == "trials: 2 finished, 0 failed, 0 left; runs/sweep-s"
    all_trials = trials(tmp_path)
    values = [last_value(tmp_path, number, "val_loss") for number in (0, 1)]
    assert [finished.value for finished in all_trials] == values
    assert values[0] != values[1]
    number = values.index(min(values))
    assert best == f"best: trial-{number}, val_loss {min(values):.6g}:"
    rate, width = all_trials[number].params.values()
    assert chosen == f"--model.learning_rate={rate} --model.width={width}"
    for trial in all_trials:
        run = tmp_path / "runs" / "sweep-s" / f"trial-{trial.number}"
        made = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]
        assert [made["learning_rate"], made["width"]] == list(trial.params.values())
        assert 1e-4 <= made["learning_rate"] <= 0.1
        assert ended(tmp_path, trial.number) == ["finished step 4"]  # none was trained again


@exhaustive
def test_all_mistakes_are_reported_before_the_first_trial(tmp_path: Path) -> None:
    search = {
        "model.width": {"low": 8, "high": 4},
        "model.dropout": [0.1, 0.2],
        "trainer.run_name": WIDTH,
        "model.classes": {"choices": [["a"]]},
        "model.channels": {"low": 1},
        "model.image_size": {"choices": ["x", ""]},
    }
    of_fit = {"data.batch_size": {"choices": [8, 9, "ten"]}, "data.shift": {"low": 0.5, "high": 4}}
    command = [*DIGITS, "--trainer.max_epoch=1", "--model.widht=3"]
    write(tmp_path, command=command, direction="up", trials=0, metrc="loss", search=search | of_fit)
    lines = sweep(tmp_path, code=1).stderr.splitlines()
    starts = ("direction='up':", "trials=0:", "metrc:", *(f"search: {name}:" for name in search))
    starts += ("model.widht:", "data.shift=0.5:", "trainer.max_epoch:", "data.shift=4.0:")
    starts += ("data.batch_size='ten':",)
    for line, begin in zip(lines, starts, strict=True):
        assert line.startswith(f"error: s.yaml: {begin} "), line
    assert not (tmp_path / "runs").exists()
    for text, says in (("- a", "contains no sections"), ("a: [", "expected the node content")):
        (tmp_path / "s.yaml").write_text(text)
        (line,) = sweep(tmp_path, code=1).stderr.splitlines()
        assert says in line


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, in a folder of its own; options are not checked by `fit`."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module = importlib.import_module("sweep")
    monkeypatch.setattr(module, "CHECK", "")
    monkeypatch.chdir(tmp_path)
    return module


def record(number: int, ended: str, **metrics: object) -> None:
    """Write what a run leaves when it has ended."""
    directory = Path("runs", "sweep-s", f"trial-{number}")
    directory.mkdir(exist_ok=True)
    attempts = [{"ended": ended, "metrics": metrics}]
    (directory / "run.json").write_text(json.dumps({"attempts": attempts}))


def test_jobs_share_a_study(script, tmp_path, monkeypatch):
    file = write(tmp_path, trials=6)
    assert script.Sweep(file, alone=True).left == 6
    taken = {
        job: script.Sweep(file, alone=False).ask(job) for job in ("7_1", "7_2", "7_3", "7_4", "7_5")
    }
    assert [run for run, _ in taken.values()] == [f"trial-{number}" for number in range(5)]
    assert len({str(words) for _, words in taken.values()}) == 5
    record(0, "finished step 4", val_loss=0.5)
    record(1, "failed rank 0: ValueError: planted")
    record(2, "finished step 4", val_loss="nan")
    record(3, "preempted SIGTERM step 2")
    for job in ("7_1", "7_2", "7_3", "7_4"):
        script.Sweep(file, alone=False).settle({job}, is_over=True)
    states = [trial.state.name for trial in trials(tmp_path)]
    assert states == ["COMPLETE", "FAIL", "FAIL", "WAITING", "RUNNING"]
    monkeypatch.setattr(script, "living_jobs", lambda: {"7_5"})
    assert script.Sweep(file, alone=True).left == 2  # number 3, and one that was never taken
    monkeypatch.setattr(script, "living_jobs", set)
    assert script.Sweep(file, alone=True).left == 3
    again = [script.Sweep(file, alone=False).ask(job) for job in ("8_1", "8_2")]
    assert again == [taken["7_4"], taken["7_5"]]  # the same options, in the same run
    assert script.Sweep(file, alone=False).left == 1
    assert script.Sweep(file, alone=False).ask("8_3")[0] == "trial-5"


def test_a_grid_has_each_combination_once(script: ModuleType, tmp_path: Path) -> None:
    note = "$(touch canary) 'x' \"y\""
    search = {"model.width": {"choices": [4, 8]}, "model.note": {"choices": [note, None, 1e-5]}}
    file = write(tmp_path, trials=None, search=search)
    script.Sweep(file, alone=True)
    assert script.Sweep(file, alone=True).left == 6
    asked = [script.Sweep(file, alone=False).ask(str(job))[1] for job in range(6)]
    own = ("run_name=trial-0", "default_root_dir=runs/sweep-s", "resume=auto", "overwrite=false")
    assert asked[0][2:] == [f"--trainer.{option}" for option in own]
    pairs = [tuple(words[:2]) for words in asked]
    notes = [f"--model.note={value}" for value in (note, "null", "1e-05")]
    assert pairs == [(f"--model.width={width}", option) for width in (4, 8) for option in notes]
    assert script.Sweep(file, alone=False).left == 0


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("trials: 3\n", "'trials' is given twice"),
        ("x: &a [1]\ny: *a\n", "x: there is no such option"),
        ("search: {model.width: {choices: [.nan]}}", "search: model.width: "),
        ("search: {model.width: {low: 0.1, high: .inf}}", "search: model.width: "),
        ("search: {model.width: {low: 1, high: 1e999}}", "search: model.width: "),
        ("search: {model.width: [8, 16]}", "expected {low: …, high: …} or {choices: […]}\n"),
        ("search: {model.width: {low: 0, high: 5, step: 2}}", "range is not divisible by `step`\n"),
        ("search: {model.width: {choices: [4, 4]}}", "search: model.width: "),
        (
            "search: {model.width: {choices: [4]}, model.init_args.width: {choices: [8]}}",
            "search: model.init_args.width: expected {low: …, high: …} or {choices: […]}: it is "
            "model.width, which is searched, too",
        ),
        ("a: " + "[" * 5000, "nested more than 50 levels deep"),
        ("metric: 'x", "not YAML"),
    ],
)
def test_a_file_that_yaml_would_misread_is_refused(script, tmp_path, damage, says):
    file = write(tmp_path)
    text = file.read_text()
    if damage.startswith("search"):
        text = text.partition("search:")[0]
    if damage.startswith("metric"):
        text = text.replace("metric: val_loss", "")
    file.write_text(f"{text}{damage}")
    with pytest.raises(UserError) as caught:
        script.Sweep(file, alone=True)
    assert says in f"{caught.value.problems[0]}\n"
    assert "\n" not in str(caught.value.problems[0])


def test_a_file_that_is_none_is_a_line(script: ModuleType, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"metric: \xff")
    for name in ("/dev/zero", tmp_path, "pipe.yaml", "bytes.yaml", "nowhere.yaml"):
        with pytest.raises(UserError) as caught:
            script.Sweep(Path(name), alone=True)
        (line,) = caught.value.problems
        assert line.startswith(f"{name}: ")


def test_a_billion_combinations_are_not_made(script: ModuleType, tmp_path: Path) -> None:
    search = {f"model.o{number}": {"choices": [*range(1000)]} for number in range(3)}
    sweep = script.Sweep(write(tmp_path, trials=None, search=search), alone=True)
    assert sweep.left == 10**9
    assert sweep.ask("")[1][:3] == [f"--model.o{number}=0" for number in range(3)]
    assert sweep.ask("")[1][2] == "--model.o2=1"


def test_a_study_whose_last_line_was_cut_continues(script: ModuleType, tmp_path: Path) -> None:
    file, log = write(tmp_path), Path("runs", "sweep-s", "study.log")
    script.Sweep(file, alone=True).ask("")
    record(0, "finished step 4", val_loss=0.5)
    script.Sweep(file, alone=True)
    content = log.read_bytes()
    for cut in range(1, 40):
        log.write_bytes(content[:-cut])
        for _ in range(2):
            script.Sweep(file, alone=True)
        assert [trial.value for trial in trials(tmp_path)] == [0.5]
    log.write_bytes(content[:50] + b"x\n" + content[50:])
    with pytest.raises(UserError, match=r"study\.log: cannot be read .* delete runs/sweep-s"):
        script.Sweep(file, alone=True)


def test_links_and_damaged_runs_are_a_line(script: ModuleType, tmp_path: Path) -> None:
    file, victim = write(tmp_path, trials=1), Path("victim")
    victim.write_text("precious")
    script.Sweep(file, alone=True).ask("")
    lock = Path("runs", "sweep-s", ".lock")
    lock.unlink()
    lock.symlink_to(victim.absolute())
    with pytest.raises(UserError, match=r"\.lock: cannot be written \(Too many levels"):
        script.Sweep(file, alone=True)
    assert victim.read_text() == "precious"
    lock.unlink()
    record(0, "finished step 4", val_loss=None)
    (Path("runs", "sweep-s", "trial-0", "run.json")).write_text('{"attempts": [{"end')
    script.Sweep(file, alone=False).settle({""}, is_over=True)
    assert [trial.state.name for trial in trials(tmp_path)] == ["FAIL"]


def test_a_wrong_metric_ends_the_sweep_until_a_trial_has_a_value(script, tmp_path, capsys):
    file = write(tmp_path)
    script.Sweep(file, alone=True).ask("")
    record(0, "finished step 4", loss=1.0)
    with pytest.raises(UserError, match="metric val_loss: runs/sweep-s/trial-0 has only loss"):
        script.Sweep(file, alone=True)
    script.Sweep(write(tmp_path, metric="loss"), alone=False).settle({""}, is_over=True)
    script.Sweep(file, alone=True).ask("")
    record(1, "finished step 4", val_loss=1.0)
    script.Sweep(file, alone=True)  # once a trial has finished, another one without it has failed
    failed = "trial-1: failed: metric loss: runs/sweep-s/trial-1 has only val_loss\n"
    assert capsys.readouterr().err.endswith(failed)
    assert [trial.value for trial in trials(tmp_path)] == [1.0, None]
    for alone in (True, False):
        with pytest.raises(UserError, match="more than `trials` changed since its "):
            script.Sweep(write(tmp_path, metric="val_loss"), alone)


@pytest.mark.parametrize("changed", ["file", "config", "option"])
def test_all_trials_train_one_configuration(script, tmp_path, changed):
    config = tmp_path / "c.yaml"
    config.write_text("trainer: {max_epochs: 1}")
    file, option = write(tmp_path, command=["--config=c.yaml"]), ["--model.classes=3"]
    script.Sweep(file, alone=True, words=option).ask("7_1")
    record(0, "finished step 4", val_loss=1.0)
    script.Sweep(file, alone=False, words=["--config=c.yaml", *option]).ask("7_2")
    config.write_text(f"trainer: {{max_epochs: {1 + (changed == 'config')}}} # a comment\n")
    option = ["--model.classes=4"] if changed == "option" else option
    file = write(tmp_path, command=["--config=c.yaml"], seed=int(changed == "file"))
    for alone, words in ((True, option), (False, ["--config=c.yaml", *option])):
        with pytest.raises(UserError, match="or a config file or option: more than `trials`"):
            script.Sweep(file, alone, words)
    script.Sweep(file, alone=False).settle({"7_1"}, is_over=True)  # it was trained before
    assert trials(tmp_path)[0].value == 1.0


def test_a_sweep_without_a_finished_trial_fails_and_says_why(script, tmp_path, monkeypatch, capsys):
    code = "error = ValueError('planted'); error.add_note('a note'); raise error"
    sweep = script.Sweep(write(tmp_path, trials=1), alone=True)
    monkeypatch.setattr(script, "FIT", [sys.executable, "-c", code])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert sweep.train() == 1
    assert capsys.readouterr().err.endswith("trial-0: failed: ValueError: planted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_check_of_options_too(tmp_path: Path, number: signal.Signals) -> None:
    pid, config = tmp_path / "pid", "import os, pathlib, time\nfrom torch import nn\n"
    config += f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "slow_to_import.py").write_text(config)
    write(tmp_path, command=["--model=slow_to_import.Model"])
    process = start([SCRIPT, "s.yaml"], cwd=tmp_path, fresh=True)
    wait_for(lambda: pid.exists() and pid.read_text(), process)
    # Ctrl-C is sent to both.
    (os.kill if number == signal.SIGTERM else os.killpg)(process.pid, number)
    _, error = process.communicate(timeout=PATIENCE)
    said = "interrupted\n" if number == signal.SIGINT else ""
    assert (process.returncode, error) == (128 + number, said)
    assert_nothing_left(tmp_path)


@exhaustive
def test_failed_trials_are_counted(tmp_path: Path) -> None:
    search = {"model.width": {"choices": [4, -1]}, "model.learning_rate": {"choices": [0.01, 1e38]}}
    write(tmp_path, trials=None, search=search)
    done = sweep(tmp_path)
    assert done.stdout.startswith("trials: 1 finished, 3 failed, 0 left; ")
    (value,) = [trial.value for trial in trials(tmp_path) if trial.value is not None]
    assert last_value(tmp_path, 0, "val_loss") == value
    failed = [line for line in done.stderr.splitlines() if ": failed: " in line]
    assert [line.partition(":")[0] for line in failed] == ["trial-1", "trial-2", "trial-3"]
    assert "the loss of step 2 is not finite" in failed[0]
    assert "width" in failed[1]


@exhaustive
def test_an_interrupted_sweep_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Also after SIGKILL, which leaves the run alone: nobody trains beside it."""
    uninterrupted, cut = tmp_path / "whole", tmp_path / "cut"
    command = [*DIGITS, *SHORT[:2], "--trainer.limit_train_batches=12"]
    command += ["--model=preemption_subject.Slow", "--model.seconds=0.5"]
    clip = {"trainer.gradient_clip_val": {"low": 0.1, "high": 1.0}}
    for folder in (uninterrupted, cut):
        folder.mkdir()
        write(folder, command=command, search=clip, seed=3)
    reference = start([SCRIPT, "s.yaml"], cwd=uninterrupted)

    process = start([SCRIPT, "s.yaml"], cwd=cut, fresh=True)
    wait_for(lambda: steps_of(cut), process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert output == "trials: 0 finished, 0 failed, 2 left; runs/sweep-s\n"
    (how,) = ended(cut, 0)
    assert how.startswith("preempted SIGINT step ")

    process = start([SCRIPT, "s.yaml"], cwd=cut, fresh=True)
    wait_for(lambda: len({row.process for row in steps_of(cut)}) == 3, process)
    os.kill(steps_of(cut)[-1].process, signal.SIGSTOP)  # the run of trial 1
    process.kill()
    process.communicate()
    assert sweep(cut, code=1).stderr == "error: runs/sweep-s: another sweep trains in it\n"
    os.kill(steps_of(cut)[-1].process, signal.SIGKILL)
    assert sweep(cut).stdout.startswith("trials: 2 finished, 0 failed, 0 left; ")

    reference.communicate(timeout=PATIENCE)
    first, second = trials(uninterrupted), trials(cut)
    assert [trial.params for trial in first] == [trial.params for trial in second]
    assert [trial.value for trial in first] == [trial.value for trial in second]
    assert first[0].params != first[1].params


@exhaustive
@pytest.mark.needs("wandb")
@pytest.mark.usefixtures("apart")
def test_an_agent_of_wandb_calls_fit_as_the_page_says() -> None:
    """The words are made by W&B's own functions; its server chooses the values."""
    from my_project_trainer.cli import configuration
    from wandb.sdk.launch.sweeps import utils

    page = (ROOT / "docs" / "how-to" / "sweep.md").read_text()
    (file,) = (
        yaml.safe_load(block.partition("```")[0])
        for block in page.split("```yaml\n")[1:]
        if block.startswith("method:")
    )
    drawn = file["parameters"].items()
    chosen = {name: {"value": 32 if "values" in parameter else 1e-3} for name, parameter in drawn}
    words = utils.create_sweep_command(file["command"])
    assert (words[0], words[-1]) == ("${env}", "${args}")
    words = [*words[1:-1], *utils.create_sweep_command_args({"args": chosen})["args"]]
    assert words[:4] == ["python", "-m", "my_project", "fit"]
    os.chdir(ROOT)
    work = configuration.read_work("my-project", "fit", [*words[4:], "--trainer.accelerator=cpu"])
    model: Any = work.model
    assert (model.network[0].out_channels, model.learning_rate) == (32, 1e-3)
