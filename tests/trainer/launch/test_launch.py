"""Real launches: our own and torchrun's, to a good end and to a bad one."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from tests.project import PACKAGE, PATIENCE, fit, run, succeed

from processes import assert_nothing_left, at_root, running, wait_for

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
SUBJECT = "launch_subject"
SHORT = ["--trainer.max_epochs", "1", "--trainer.loggers", "[csv]"]


def launched(launcher: str, *arguments: str | Path) -> list[str | Path]:
    """A fit on two processes by our own launcher or by torchrun."""
    if launcher == "torchrun":
        return [*TORCHRUN, *fit(*SHORT, *arguments)]
    return fit("--trainer.devices", "2", *SHORT, *arguments)


def model(name: str, folder: Path) -> list[str | Path]:
    return ["--model", f"{SUBJECT}.{name}", "--trainer.default_root_dir", folder]


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "ours"])
def test_trains_on_two_processes(tmp_path, launcher):
    done = succeed(launched(launcher, "--trainer.default_root_dir", tmp_path), fresh=True)
    (record,) = json.loads(next(tmp_path.glob("*/run.json")).read_text())["attempts"]
    assert record["layout"]["world_size"] == 2
    sources = {"torchrun": "torchelastic", "ours": "environment"}
    assert record["layout"]["source"] == sources[launcher]
    assert "layout: 2 processes on 1 node" in done.stdout
    assert "effective batch size 64 (32 per device, 2 replicas, 1 accumulated)" in done.stdout
    assert "steps per epoch 22, epochs 1, total steps 22" in done.stdout


@pytest.mark.parametrize("launcher", ["torchrun", "ours"])
def test_a_rank_that_raises_ends_all_and_is_the_one_shown(tmp_path, launcher):
    arguments = launched(launcher, *model("RaisesOnOneRank", tmp_path))
    done = run(arguments, cwd=tmp_path, extra=at_root())
    # Sooner than the 600 s of a collective.
    assert time.time() - float((tmp_path / "raised").read_text()) < 300
    assert done.returncode == 1
    assert "ArithmeticError: planted on rank 1" in done.stderr
    assert "Connection closed" not in done.stderr
    assert_nothing_left(tmp_path)


def test_a_rank_reports_what_it_cannot_do_before_it_trains(tmp_path):
    launch = {"TRAINER_FAILURE_DIR": str(tmp_path), "TRAINER_PARENT_PID": str(os.getpid())}
    done = run(["-m", PACKAGE, "fti"], extra=launch | {"RANK": "1"})
    assert (done.returncode, done.stderr) == (2, "")
    said = json.loads((tmp_path / "rank-1.json").read_text())["message"]
    assert said == "rank 1: error: 'fti' is not a command; did you mean 'fit'?"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (signal.SIGINT, signal.SIGKILL)),
    ],
)
def test_a_launcher_that_is_ended_takes_its_ranks_along(tmp_path, number):
    # A step that takes a minute is not waited for longer than this.
    variables = at_root() | {"TRAINER_SAVE_SECONDS": "2"}
    arguments = launched("ours", *model("Sleeps", tmp_path))
    with running(arguments, tmp_path, extra=variables, fresh=True) as process:
        ranks = wait_for_ranks(tmp_path, process)
        process.send_signal(number)
        assert process.wait(PATIENCE) != 0
        _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
        assert alive == []


@pytest.mark.slow
def test_a_run_on_one_node_listens_on_loopback_only(tmp_path):
    with running(launched("ours", *model("Sleeps", tmp_path)), tmp_path) as process:
        family = [psutil.Process(process.pid), *wait_for_ranks(tmp_path, process)]
        sockets = [connection for member in family for connection in member.net_connections("inet")]
        listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
        assert listening
        assert set(listening) <= {"127.0.0.1", "::1"}


def wait_for_ranks(folder: Path, launcher: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Both ranks of ``Sleeps``, in their first step."""
    files = [folder / f"rank-{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), launcher)
    return [psutil.Process(int(file.read_text())) for file in files]


def test_an_interactive_session_is_told_what_to_do():
    code = f"""
import sys; sys.ps1 = ">>> "
from {PACKAGE}.tasks.image_classifier import ImageClassifier
from {PACKAGE}_trainer import Trainer, UserError
try:
    Trainer(max_epochs=1, devices=2, accelerator="cpu", strategy="ddp").fit(ImageClassifier())
except UserError as error:
    print(error)
"""
    assert "write a script, or use torchrun" in run(["-c", code]).stdout


def test_launch_needs_no_more_processes_than_there_are(tmp_path):
    done = run([*TORCHRUN, *fit("--trainer.devices", "3", "--trainer.global_batch_size", "66")])
    assert done.returncode != 0
    line = "needs 3 processes per node, but torchelastic started 2; leave out devices, or start 3; "
    assert line in done.stderr
