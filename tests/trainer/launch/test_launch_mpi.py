"""Real launches by mpirun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch import losses
from tests.project import PATIENCE, environment, fit, mpirun, succeed

from processes import at_root

pytestmark = pytest.mark.needs("mpirun")


def arguments(folder: Path, name: str, *more: str) -> list[str | Path]:
    """A short fit with ddp, as a named run in a folder."""
    short = ["--trainer.max_epochs", "1", "--trainer.loggers", "[csv]", "--model.dropout", "0"]
    into = ["--trainer.default_root_dir", folder, "--trainer.run_name", name]
    log = ["--trainer.log_every_n_steps", "1"]
    return fit("--trainer.strategy", "ddp", *short, *log, *into, *more)


def start(folder: Path, name: str) -> "subprocess.Popen[str]":
    """Start that fit on two processes by mpirun, which gets no further variable."""
    return subprocess.Popen(
        [*mpirun(2), sys.executable, *map(str, arguments(folder, name))],
        cwd=folder,
        env=environment(at_root()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> None:
    """Wait for a good end; one that takes too long is asked to end, and takes its ranks along."""
    try:
        _, error = process.communicate(timeout=PATIENCE)
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    assert process.returncode == 0, error


@pytest.mark.slow
def test_ddp_trains_as_it_does_by_our_own_launcher(tmp_path):
    finish(start(tmp_path, "mpirun"))
    (attempt,) = json.loads((tmp_path / "mpirun" / "run.json").read_text())["attempts"]
    layout = attempt["layout"]
    assert (layout["source"], layout["world_size"], layout["num_nodes"]) == ("openmpi", 2, 1)
    succeed(arguments(tmp_path, "ours", "--trainer.devices", "2"))
    assert len(losses(tmp_path / "mpirun")) == 22
    assert losses(tmp_path / "mpirun") == losses(tmp_path / "ours")


@pytest.mark.slow
def test_two_launches_in_one_folder_do_not_meet(tmp_path):
    processes = [start(tmp_path, name) for name in ("one", "other")]
    try:
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.terminate()
    assert losses(tmp_path / "one") == losses(tmp_path / "other")
    assert not list(tmp_path.glob(".rendezvous*"))
