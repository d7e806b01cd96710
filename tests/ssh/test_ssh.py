"""`ssh/train.sh` on hosts with a real sshd: the numbers, how it is stopped, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import yaml
from slurm.jobs import PLAIN, difference, until, value

from .runs import Project, Run

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(1800)]
BOTH = "one\ntwo 1 # a comment\n\n# another\n"
# Random numbers too must continue where they were: dropout, and images that are shifted at random.
NOISY = (*PLAIN, "--data.shift=1", "--model=subject.Slow", "--model.dropout=0.2")
HOSTILE = """it's "x" $(touch canary) `touch canary`; touch canary \\ * & | > canary"""


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> Run:
    """Return a run of 66 steps on two hosts that nothing has stopped."""
    run = project.start(BOTH, "undisturbed", *NOISY)
    assert run.end() == 0, run.said
    return run


def test_two_hosts_train_as_one_process(project: Project) -> None:
    fit = (*PLAIN, "--model=subject.Slow", "--model.dropout=0", f"--model.note={HOSTILE}")
    run = project.start(BOTH, "both", *fit)
    alone = project.fit_alone("alone", *fit)
    assert run.end() == 0, run.said
    layout = json.loads((run.directory / "run.json").read_text())["attempts"][-1]["layout"]
    assert (layout["world_size"], layout["num_nodes"], layout["source"]) == (2, 2, "torchelastic")
    metrics = run.metrics()
    assert len({row[0] for row in metrics}) == 66
    assert difference(metrics, alone, steps=20) < 1e-5
    assert value(metrics, "val_accuracy") == pytest.approx(value(alone, "val_accuracy"), abs=1e-2)
    config = yaml.safe_load((run.directory / "config.yaml").read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["note"] == HOSTILE
    starts = ("one: ", "two: ", "train.sh: ")
    assert [line for line in run.said.splitlines() if not line.startswith(starts)] == []


def test_hosts_may_have_different_numbers_of_processes(project: Project) -> None:
    fit = (*PLAIN, "--model.dropout=0", "--trainer.max_epochs=1", "--trainer.global_batch_size=60")
    run = project.start("one 2\ntwo\n", "three", *fit)
    assert run.end() == 0, run.said
    layout = json.loads((run.directory / "run.json").read_text())["attempts"][-1]["layout"]
    assert (layout["world_size"], layout["num_nodes"], layout["local_world_size"]) == (3, 2, 2)
    assert difference(run.metrics(), project.fit_alone("alone-of-three", *fit), steps=20) < 1e-5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_saves_and_resumes(
    project: Project, undisturbed: Run, number: signal.Signals, code: int
) -> None:
    name = f"stopped-by-{number.name}"
    run = project.start(BOTH, name, *NOISY, "--model.seconds=[0.5]")
    run.reach(4)
    assert run.end(number) == code, run.said
    assert f"train.sh: {number.name}: the ranks are told to save\n" in run.said
    assert ": preempted SIGTERM step " in run.said.splitlines()[-1]
    assert 4 <= int(run.metrics()[-1][0]) < 66
    again = project.start(BOTH, name, *NOISY)
    assert again.end() == 0, again.said
    assert "resumed from" in again.said
    ours, theirs = ((one.directory / "metrics.csv").read_bytes() for one in (again, undisturbed))
    assert ours == theirs


def test_ranks_end_when_the_script_is_killed(project: Project) -> None:
    run = project.start(BOTH, "killed", *NOISY, "--model.seconds=[0.5]")
    run.reach(2)
    os.kill(run.process.pid, signal.SIGKILL)
    run.end()
    for name in ("one", "two"):
        assert project.left_on(name) == []
    saved = list((run.directory / "checkpoints").iterdir())
    assert len(saved) == 1  # within the first epoch, because of the signal


def test_a_second_signal_kills(project: Project) -> None:
    run = project.start(BOTH, "impatient", *NOISY, "--model.seconds=[30]")
    until(run.directory.exists, lambda: run.said)
    os.kill(run.process.pid, signal.SIGTERM)
    until(lambda: "told to save" in run.said, lambda: run.said)
    before = time.monotonic()
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() != 0
    assert "train.sh: SIGTERM: the ranks are told to end\n" in run.said
    assert time.monotonic() - before < 90  # not SAVE_SECONDS


def test_a_rank_that_raises_ends_all_hosts_with_the_reason(project: Project) -> None:
    run = project.start(BOTH, "failing", *PLAIN, "--model=subject.Failing")
    assert run.end() == 1, run.said
    last = run.said.splitlines()[-1]
    assert last.startswith("train.sh: ")
    assert last.endswith("ended with exit code 1: failed rank 1: ValueError: planted on purpose")


def test_a_lost_host_ends_the_others(project: Project) -> None:
    run = project.start(BOTH, "lost", *NOISY, "--model.seconds=[0.5]")
    run.reach(2)
    try:
        project.network.kill("two")
        assert run.end() != 0
    finally:
        project.network.start("two")
    assert run.said.splitlines()[-1].startswith("train.sh: ")
    assert project.left_on("one") == []


def test_a_wrong_option_is_an_error_of_the_user(project: Project) -> None:
    run = project.start(BOTH, "wrong", *PLAIN, "--trainer.max_epoch=1")
    assert run.end() == 2, run.said
    assert "max_epochs" in run.said
    assert not run.directory.exists()


def test_a_host_that_shares_nothing_is_noted(project: Project) -> None:
    run = project.start("one\napart\n", "unshared", *PLAIN, "--trainer.max_epochs=1")
    assert run.end() == 0, run.said
    notes = [line for line in run.said.splitlines() if line.startswith("train.sh: ")]
    assert len(notes) == 1
    assert notes[0].startswith("train.sh: note: the hosts do not share runs/")


def test_a_host_with_another_code_is_refused(project: Project) -> None:
    other = project.network.folder / "copy" / "configs" / "digits.yaml"
    before = other.read_text(encoding="utf-8")
    other.write_text(before + "# changed\n", encoding="utf-8")
    try:
        run = project.start("one\napart\n", "other-code", *PLAIN)
        assert run.end() == 2, run.said
    finally:
        other.write_text(before, encoding="utf-8")
    reason = "apart has other files in src, configs or requirements than one: copy the folder\n"
    assert run.said == f"train.sh: {reason}"


@pytest.mark.parametrize(
    ("hosts", "extra", "code", "line"),
    [
        ("one\nnobody\n", {}, 255, "train.sh: nobody ended with exit code 255: ssh has lost it"),
        ("nobody\none\n", {}, 255, "train.sh: nobody ended with exit code 255: ssh has lost it"),
        ("-oProxyCommand=x\n", {}, 2, "train.sh: hosts-"),
        ("one; touch canary\n", {}, 2, "train.sh: hosts-"),
        ("one $(touch canary)\n", {}, 2, "train.sh: hosts-"),
        ("one 0\n", {}, 2, "train.sh: hosts-"),
        ("# nobody\n", {}, 2, "train.sh: hosts-"),
        (BOTH, {"VENV": "/no $(touch canary)"}, 2, "train.sh: "),
        (BOTH, {"CONTAINER": "pyxis"}, 2, "train.sh: "),
        (BOTH, {"FOLDER": "/no $(touch canary)"}, 2, "train.sh: "),
        (BOTH, {"SAVE_SECONDS": "a[$(touch canary)]"}, 2, "train.sh: "),
    ],
)
def test_what_cannot_be_started_is_said(
    project: Project, hosts: str, extra: dict[str, str], code: int, line: str
) -> None:
    run = project.start(hosts, "not-started", *PLAIN, **extra)
    assert run.end() == code, run.said
    assert run.said.splitlines()[-1].startswith(line)
    assert not run.directory.exists()
