"""Ctrl-C: the first one saves and says how to resume, in a line; a second one ends at once."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.project import PACKAGE, PATIENCE, fit, succeed

from preemption_subject import steps_of
from processes import assert_nothing_left, at_root, running, told_in, wait_for

slow = pytest.mark.slow
Arguments = list[str | Path]
CPU = ["--trainer.accelerator", "cpu"]


def has_noted_an_interrupt(process: int) -> bool:
    """Whether a process that trains has had its first SIGINT: the next one ends it."""
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16)
    return not caught >> (signal.SIGINT - 1) & 1


def interrupt(arguments: Arguments, folder: Path, *when: Callable[[], Any]) -> tuple[int, str]:
    """Press Ctrl-C each time ``when`` something has happened; exit code and errors.

    A terminal sends it to all processes of its group.
    """
    with running(arguments, folder, extra=told_in(folder)) as process:
        for condition in when:
            wait_for(condition, process)
            os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE)
    assert_nothing_left(folder)
    return process.returncode, error


def fit_of(devices: int, *more: str, model: str = "preemption_subject.Slow") -> Arguments:
    """A fit that goes on until it is ended."""
    size = ["--trainer.devices", str(devices), "--trainer.max_steps", "1000000"]
    quiet = ["--trainer.loggers", "[csv]", "--trainer.enable_progress_bar=false"]
    return fit(*CPU, "--model", model, *size, *quiet, *more)


@slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_one_saves_and_says_how_to_resume(tmp_path, devices):
    arguments = fit_of(devices, "--data.num_workers", "1", "--trainer.run_name", "run")
    code, error = interrupt(arguments, tmp_path, lambda: len(steps_of(tmp_path)) > 3)
    assert code == 130
    resume = "resume with: the same command and --trainer.resume runs/run\n"
    match = re.fullmatch(rf"interrupted: saved after step (\d+); {resume}", error)
    assert match, error
    step = int(match[1])
    assert (tmp_path / "outcome").read_text() == f"preempted SIGINT step {step}\n"
    two_more = ["--trainer.resume", "runs/run", "--trainer.max_steps", str(step + 2)]
    succeed([*arguments, *two_more], cwd=tmp_path, extra=at_root())
    assert [row.step for row in steps_of(tmp_path)] == [*range(step), step, step + 1]


@slow
@pytest.mark.parametrize(
    ("devices", "expected"), [(1, (-signal.SIGINT, "")), (2, (130, "interrupted\n"))]
)
def test_a_second_one_ends_at_once(tmp_path, devices, expected):
    arguments = fit_of(devices, model="launch_subject.Sleeps")
    ranks = [tmp_path / f"rank-{rank}" for rank in range(devices)]
    ended = interrupt(
        arguments,
        tmp_path,
        lambda: all(rank.exists() and rank.read_text() for rank in ranks),
        lambda: all(has_noted_an_interrupt(int(rank.read_text())) for rank in ranks),
    )
    assert ended == expected
    assert list(tmp_path.glob("runs/*/checkpoints/*")) == []


def test_outside_a_fit_it_is_one_short_line(tmp_path):
    arguments = ["-m", PACKAGE, "test", *fit()[3:], *CPU, "--trainer.devices", "1"]
    arguments += ["--checkpoint", "none", "--data.num_workers", "1"]
    arguments += ["--model", "launch_subject.SlowTest"]
    code, error = interrupt(arguments, tmp_path, (tmp_path / "testing-0").exists)
    assert (code, error) == (130, "interrupted\n")
    assert (tmp_path / "outcome").read_text() == "failed interrupted\n"


def test_while_torch_is_imported_it_is_one_short_line(tmp_path):
    with running(fit_of(1), tmp_path, fresh=True) as process:
        wait_for(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), process)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, error) == (130, "interrupted\n")


@slow
def test_ranks_that_are_still_starting_print_nothing(tmp_path):
    with running(fit_of(2), tmp_path, fresh=True) as process:
        parent = psutil.Process(process.pid)
        wait_for(lambda: len(parent.children()) == 2, process)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, error) == (130, "interrupted\n")
    assert_nothing_left(tmp_path)


SCRIPT = f"""
import sys
from {PACKAGE}.tasks.digits import Digits
from {PACKAGE}_trainer import Trainer
from preemption_subject import Slow
if __name__ == "__main__":
    made = Trainer(
        accelerator="cpu", devices=int(sys.argv[1]), max_steps=1000000, loggers=[], run_name="run",
        enable_progress_bar=False,
    )
    try:
        made.fit(Slow(0.05), Digits())
    finally:
        if made.global_rank == 0:
            print(made.global_step, made.run_directory)
"""


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=slow)])
def test_a_script_ends_with_the_line_and_no_traceback(tmp_path, devices):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, error = interrupt([script, str(devices)], tmp_path, lambda: len(steps_of(tmp_path)) > 2)
    assert code == 130
    resume = r"resume with: Trainer\(resume='runs/run'\)\n"
    match = re.fullmatch(rf"interrupted: saved after step (\d+); {resume}", error)
    assert match, error
    state = tmp_path / "runs/run/checkpoints" / f"step-{int(match[1]):08d}/state.json"
    position = json.loads(state.read_text())["content"]["state"]["position"]
    assert position["global_step"] == int(match[1])
