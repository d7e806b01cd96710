"""A rank that raises on the GPU ends the run soon, and says where."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from tests.gpu import device
from tests.project import run

from .failing_subject import LONG

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(700)]
# NCCL cannot connect two ranks on one GPU; gloo can.
GLOO = {"TRAINER_BACKEND": "cpu:gloo,cuda:gloo"}


def fail(
    kind: str, folder: Path, **variables: str
) -> tuple["subprocess.CompletedProcess[str]", float]:
    """The ended run, and the seconds from its failure to its end."""
    arguments = ["-m", "gpu.failing_subject", kind, folder]
    done = run(arguments, extra=variables, fresh=True, timeout=LONG)
    ended, struck = time.time(), folder / "struck"
    assert struck.exists(), done.stderr
    return done, ended - float(struck.read_text())


def test_an_exception_ends_the_run_at_once(tmp_path, record_property):
    done, seconds = fail("raises", tmp_path)
    assert done.returncode == 1
    assert "ArithmeticError: planted" in done.stderr.splitlines()[-1]
    device.only_a_gpu_shows("how soon a process ends that has work queued")
    record_property("found", f"{seconds:.1f} s (bound 5 s)")
    assert seconds < 5


def test_an_exception_of_one_rank_ends_all(tmp_path, record_property):
    done, seconds = fail("one_of_two", tmp_path, **(GLOO if device.IS_GPU else {}))
    assert done.returncode == 1
    assert "ArithmeticError: planted" in done.stderr
    assert re.search(r"rank 1\b", done.stderr.splitlines()[-1]), done.stderr
    record_property("found", f"{seconds:.1f} s (bound 10 s)")
    # Without the watcher it would be the timeout; on a CPU, only that is excluded.
    assert seconds < (10 if device.IS_GPU else LONG)
