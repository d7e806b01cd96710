"""A run that is told to end saves, says so, and goes on later as if nothing had happened."""

import itertools
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.launch import reports, signals
from tests.project import PACKAGE, PATIENCE, fit, run, succeed

from processes import assert_nothing_left, at_root, running, told_in, wait_for

slow = pytest.mark.slow
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def command(launch: str, folder: Path, name: str) -> list[str | Path]:
    """A fit that can be gone on with, by one process, our launcher, a strategy's, or torchrun."""
    arguments = fit(
        *("--model", "preemption_subject.Slow"),
        *("--trainer.global_batch_size", "32", "--trainer.max_epochs", "8"),
        *("--trainer.log_every_n_steps", "1", "--trainer.loggers", "[csv]"),
        *("--trainer.default_root_dir", folder, "--trainer.run_name", name),
        *("--trainer.resume", "auto", "--trainer.accelerator", "cpu"),
        *("--trainer.enable_progress_bar", "false"),
    )
    if launch == "torchrun":
        return [*TORCHRUN, "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", *arguments]
    if launch != "one":
        strategy = launch if launch.startswith("ddp") else "ddp"
        return [*arguments, "--trainer.devices", "2", "--trainer.strategy", strategy]
    return arguments


def preempt(arguments: list[str | Path], folder: Path, name: str, number: int) -> tuple[int, str]:
    """Start a run, send it a signal some time after its first values; exit code and outcome."""
    told = folder / "outcome"
    told.unlink(missing_ok=True)
    log = folder / name / "metrics.csv"
    seen = log.stat().st_size if log.exists() else 0
    with running(arguments, folder, extra=told_in(folder)) as process:
        wait_for(lambda: log.exists() and log.stat().st_size > max(seen, 30), process)
        time.sleep(random.uniform(0, 0.3))
        process.send_signal(number)
        _, error = process.communicate(timeout=PATIENCE)
    assert told.exists(), error
    assert_nothing_left(folder)
    return process.returncode, told.read_text()


@pytest.mark.parametrize(
    ("launch", "number"),
    [
        pytest.param("one", signal.SIGUSR1, marks=slow),
        pytest.param("ours", signal.SIGINT, marks=slow),
        *(
            # CI leaves these to soak/, which signals runs at random.
            pytest.param(launch, number, marks=[slow, pytest.mark.exhaustive])
            for launch, number in [
                ("one", signal.SIGINT),
                ("one", signal.SIGTERM),
                ("ours", signal.SIGUSR1),
                ("ddp_spawn", signal.SIGTERM),
                ("ddp_fork", signal.SIGINT),
                ("torchrun", signal.SIGUSR1),
                ("torchrun", signal.SIGINT),
            ]
        ),
    ],
)
def test_a_run_preempted_twice_equals_one_that_was_not(tmp_path, launch, number):
    done = run(command(launch, tmp_path, "whole"), cwd=tmp_path, extra=told_in(tmp_path))
    finished = (tmp_path / "outcome").read_text()
    assert done.returncode == 0, done.stderr
    arguments = command(launch, tmp_path, "stopped")
    for _ in range(2):
        code, told = preempt(arguments, tmp_path, "stopped", number)
        assert told.startswith(f"preempted {signal.Signals(number).name} step ")
        assert checkpoint.resolve(tmp_path / "stopped").name == f"step-{int(told.split()[-1]):08d}"
        if launch != "torchrun":
            assert code in (128 + number, -number)
    done = succeed(arguments, cwd=tmp_path, extra=told_in(tmp_path))
    assert (tmp_path / "outcome").read_text() == finished
    assert finished.startswith("finished step ")
    logs = [(tmp_path / name / "metrics.csv").read_bytes() for name in ("whole", "stopped")]
    assert logs[0] == logs[1]
    assert len(list(tmp_path.glob("*/run.json"))) == 2


@pytest.mark.slow
def test_ranks_with_loader_workers_save_too(tmp_path):
    arguments = [*command("ours", tmp_path, "run"), "--data.num_workers", "1"]
    code, told = preempt(arguments, tmp_path, "run", signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert told.startswith("preempted SIGTERM step ")


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all(tmp_path):
    told, metrics = tmp_path / "outcome", tmp_path / "run" / "metrics.csv"
    arguments = command("ours", tmp_path, "run")
    with running(arguments, tmp_path, extra=told_in(tmp_path), fresh=True) as process:
        # A row of a step: all ranks train.
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, process)
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda each: each.pid)
        ranks[1].send_signal(signal.SIGUSR1)
        _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGUSR1
    assert re.fullmatch(r"note: saved after step \d+ and stopped by SIGUSR1\n", error)
    assert told.read_text().startswith("preempted SIGUSR1 step ")


def test_a_handler_of_the_program_stays(tmp_path):
    script = f"""
import os, signal, sys
from {PACKAGE}_trainer.launch.signals import Preemption
signal.signal(signal.SIGUSR1, lambda *_: print("own", flush=True))
asked = Preemption()
with asked.recording_signals():
    os.kill(os.getpid(), signal.SIGUSR1)
    assert asked.requested() == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked.requested() == signal.SIGTERM
print("never")
"""
    done = run(["-c", script], cwd=tmp_path, extra=at_root())
    assert done.stdout == "own\n"
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--trainer.max_steps", "2"], 0, "finished step 2\n"),
        (["--trainer.strategy", "dddp"], 2, "failed error: .*'dddp'.*\n"),
        (["--data.batch_size", "-1"], 1, "failed .*batch_size.*\n"),
    ],
)
def test_the_outcome_is_told(tmp_path, arguments, code, expected):
    told = tmp_path / "outcome"
    told.write_text("preempted SIGUSR1 step 3\n" if code == 0 else "")
    if code:
        told.unlink()
    words = fit("--trainer.default_root_dir", tmp_path, *arguments)
    done = run(words, cwd=tmp_path, extra=told_in(tmp_path))
    assert done.returncode == code, done.stderr
    assert re.fullmatch(expected, told.read_text())
    assert list(tmp_path.glob(".outcome*")) == []


def test_of_several_failures_the_first_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(reports.OUTCOME, str(tmp_path / "outcome"))
    reports.write_failed("  File x\nrank 1: ValueError: bad\n")
    reports.write_failed("rank 0: ValueError: bad, too")
    assert (tmp_path / "outcome").read_text() == "failed rank 1: ValueError: bad\n"
    reports.remove_outcome()
    reports.remove_outcome()
    assert list(tmp_path.iterdir()) == []


def test_how_often_ranks_agree_follows_their_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(signals.collectives, "world_size", lambda: 2)
    agreed = []

    def all_reduce(tensor, how):
        assert tensor.device.type == "cpu"  # a GPU's would have the host wait for all steps so far
        agreed.append(step)
        return tensor

    monkeypatch.setattr(signals.collectives, "all_reduce", all_reduce)
    asked = signals.Preemption()
    for step in range(1, 1001):  # noqa: B007 - all_reduce reads it
        now[0] += 0.01
        assert asked.requested() == 0
    # Twice as long each time, until about a second lies between.
    assert agreed[:7] == [1, 3, 7, 15, 31, 63, 127]
    assert {b - a for a, b in itertools.pairwise(agreed[7:])} <= {99, 100}
