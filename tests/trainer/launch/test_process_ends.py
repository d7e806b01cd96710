"""A process ends when its work is done, and never with exit code 0 before."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import pytest
import test_lineage
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.launch import reports, signals
from tests.project import PATIENCE, environment, fit, run, start, succeed

from preemption_subject import steps_of
from processes import at_root


def command(fault: str, devices: int = 1) -> list[str | Path]:
    """A fit of three steps, in the last of which something happens on each rank."""
    return fit(
        *("--model", "fault_subject.Fails", "--model.fault", fault, "--model.rank", "0"),
        *("--trainer.devices", str(devices), "--trainer.accelerator", "cpu"),
        *("--trainer.max_steps", "4", "--trainer.loggers", "[csv]"),
        *("--trainer.run_name", "run", "--trainer.checkpoint_every_n_steps", "2"),
    )


def test_sys_exit_in_a_step_is_no_success(tmp_path):
    done = run(command("exits"), cwd=tmp_path, extra=at_root() | {reports.OUTCOME: "told"})
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    problem = "error: user code called sys.exit(0) in step 3, before fit ended"
    assert line.startswith(f'{problem} (File "')
    assert line.endswith(" in exits): return instead, or raise an error")
    assert (tmp_path / "told").read_text().startswith("failed ")


def test_os_exit_in_one_process_tells_no_outcome_and_the_next_start_says_it(tmp_path):
    """The process has nobody that watches it."""
    extra = at_root() | {reports.OUTCOME: "told"}
    (tmp_path / "told").write_text("finished step 4\n")
    done = succeed(command("leaves"), cwd=tmp_path, extra=extra)
    assert not (tmp_path / "told").exists()
    refused = run(command("leaves"), cwd=tmp_path, extra=extra)
    assert "there is a run already, which has not finished; resume it" in refused.stderr
    resumed = [*command("leaves"), "--model.step", "99", "--trainer.resume", "auto"]
    note = "note: the previous attempt did not record its end: it was killed, "
    for expected in (True, False):
        done = succeed(resumed, cwd=tmp_path, extra=extra)
        assert (note in done.stderr) == expected
    attempts = json.loads((tmp_path / "runs/run/run.json").read_text())["attempts"]
    ended = [attempt.get("ended") for attempt in attempts]
    assert ended == [None, "finished step 4", "finished step 4"]


READER = """
import sys, test_process_ends
test_process_ends.train(int(sys.argv[1]))
"""


class Prints(trainer.Callback):
    """Prints in each epoch, when nothing reads it any more."""

    def on_train_epoch_end(self, run: Any, module: Any) -> None:
        print(f"epoch {run.current_epoch}", flush=True)


def train(devices: int) -> None:
    made = trainer.Trainer(
        accelerator="cpu", devices=devices, max_epochs=3, run_name="run", callbacks=[Prints()]
    )
    made.fit(test_lineage.Model())


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_continues_when_nothing_reads_its_output(tmp_path, devices):
    process = start(["-c", READER, str(devices)], cwd=tmp_path, extra=at_root(), fresh=True)
    try:
        assert process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        _, error = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, error
    assert error.count("note: nothing reads the output any more; the command continues\n") == 1
    assert checkpoint.resolve(tmp_path / "runs" / "run").name == f"step-0000000{6 // devices}"


ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("devices", "outputs", "variables"),
    [
        pytest.param(2, ">&- 2>&-", {}, id="closed", marks=pytest.mark.slow),
        pytest.param(1, "2>/dev/full", ASCII, id="ascii, errors full"),
        pytest.param(2, "2>/dev/full", {}, id="errors full", marks=pytest.mark.slow),
        pytest.param(2, ">/dev/full", {}, id="full", marks=pytest.mark.slow),
        pytest.param(2, "", ASCII, id="ascii", marks=pytest.mark.slow),
    ],
)
def test_training_needs_no_output_and_no_locale(tmp_path, devices, outputs, variables):
    code = f'exec "$0" -W always -c "$1" {devices} {outputs}'
    command = ["bash", "-c", code, sys.executable, READER]
    environment = {**os.environ, **at_root(), **variables}
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=PATIENCE, check=True)
    assert checkpoint.resolve(tmp_path / "runs" / "run").name == f"step-0000000{6 // devices}"
    header, *rows = (tmp_path / "runs/run/metrics.csv").read_text().splitlines()
    assert header == "step,epoch,name,value"
    assert [row.split(",")[2] for row in rows] == ["loss", "lr"] * 2  # not what is printed


def test_a_directory_that_was_removed_is_named(tmp_path):
    words = ["sh", "-c", 'rmdir "$PWD"; exec "$0" -m my_project fit', sys.executable]
    (tmp_path / "gone").mkdir()
    done = subprocess.run(words, cwd=tmp_path / "gone", capture_output=True, text=True, check=False)
    line = "error: the working directory was removed; change to one that exists\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_changed_directory_changes_no_path(tmp_path, devices):
    arguments = command("changes_the_directory", devices)
    done = succeed(arguments, cwd=tmp_path, extra=at_root() | {reports.OUTCOME: "told"})
    assert "run directory: runs/run\n" in done.stdout
    assert checkpoint.resolve(tmp_path / "runs" / "run").name == "step-00000004"
    assert (tmp_path / "told").read_text() == "finished step 4\n"
    assert not list((tmp_path / "elsewhere").glob("runs"))


@pytest.mark.slow
def test_a_terminal_that_is_closed_lets_the_run_save(tmp_path):
    """Its SIGHUP is sent, and whatever the run prints afterward is an error."""
    arguments = fit(
        *("--model", "preemption_subject.Slow", "--trainer.run_name", "run"),
        *("--trainer.devices", "1", "--trainer.accelerator", "cpu", "--trainer.loggers", "[]"),
        *("--trainer.max_steps", "1000000"),
    )
    terminal, follower = pty.openpty()
    told = tmp_path / "outcome"
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=tmp_path,
        env=environment(at_root() | {reports.OUTCOME: str(told), "TERM": "xterm"}),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    try:
        deadline = time.monotonic() + PATIENCE
        os.set_blocking(terminal, False)
        while len(steps_of(tmp_path)) < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(BlockingIOError):
                os.read(terminal, 100_000)
            time.sleep(0.02)
        os.close(terminal)
        # The kernel sends it to the session that has the terminal; this one has not asked for it.
        os.killpg(process.pid, signal.SIGHUP)
        code = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert code == 128 + signal.SIGHUP
    step = int(told.read_text().removeprefix("preempted SIGHUP step "))
    assert checkpoint.resolve(tmp_path / "runs" / "run").name == f"step-{step:08d}"


def test_nohup_stays_in_force(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signals.is_ignored(signal.SIGHUP)
        with signals.Preemption().recording_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not signals.is_ignored(signal.SIGTERM)


SAVES = """
import os, signal, sys
from pathlib import Path
from preemption_subject import Slow
import my_project_trainer as trainer
from my_project.tasks.digits import Digits
from my_project_trainer.checkpoint import tensor_files as writer
write = writer.write

def interrupted(*arguments):
    for _ in range({times}):
        os.kill(os.getpid(), signal.{name})
    return write(*arguments)
if __name__ == "__main__":
    run = trainer.Trainer(
        accelerator="cpu", devices=1, max_steps=20, loggers=[], run_name="run", resume="auto",
        enable_progress_bar=False, checkpoint_every_n_steps=4,
    )
    if not Path("runs/run/checkpoints").exists() or len(sys.argv) > 1:
        writer.write = interrupted
    run.fit(Slow(0), Digits())
    print(run.global_step)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_within_a_save_does_not_break_it(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(SAVES.format(name=name, times=1))
    done = run([script], cwd=tmp_path, extra=at_root())
    assert done.returncode == 128 + getattr(signal, name), done.stderr
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000004"]
    checkpoint.Checkpoint(checkpoints / "step-00000004").state()
    done = run([script], cwd=tmp_path, extra=at_root())
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr


def test_a_second_ctrl_c_within_a_save_leaves_a_part_that_is_ignored(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SAVES.format(name="SIGINT", times=2))
    done = run([script], cwd=tmp_path, extra=at_root())
    assert done.returncode == -signal.SIGINT
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    (folder,) = checkpoints.iterdir()
    assert re.fullmatch(r"\.step-00000004\.1-[0-9a-f]+\.partial", folder.name)
    done = run([script], cwd=tmp_path, extra=at_root())
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr
    assert not folder.exists()
