"""How runs of a parameter server end early, and go on."""

import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_parameter_server import STEPS, train

from parameter_server_subject import SAMPLES

pytestmark = pytest.mark.slow


def test_a_lost_server_ends_the_run_with_one_line(tmp_path: Path) -> None:
    options = {"devices": 3, "max_epochs": 50}
    code, error, _ = train(tmp_path, options, {"ends": {"0": [5, "SIGKILL"]}})
    assert code == 128 + signal.SIGKILL, error
    advice = "if nobody sent it, memory ran out: see docs/trouble.md#a-rank-was-killed\n"
    assert error == f"rank 0 was killed by SIGKILL; {advice}"


def test_an_error_of_a_worker_ends_the_run(tmp_path: Path) -> None:
    options = {"devices": 3, "max_epochs": 50}
    code, error, _ = train(tmp_path, options, {"ends": {"2": [5, "error"]}})
    assert code == 1
    assert error.splitlines()[-1] == "rank 2: OSError: the disk is gone"


def test_an_error_of_the_optimizer_ends_the_run(tmp_path: Path) -> None:
    code, error, _ = train(tmp_path, {"devices": 3, "max_epochs": 50}, {"fails": 5})
    assert code == 1
    assert error.splitlines()[-1] == "rank 0: ValueError: bad rate"


def test_a_worker_that_hangs_ends_the_run(tmp_path: Path) -> None:
    # expires
    options = {"devices": 3, "max_epochs": 2, "strategy_options": {"timeout_seconds": 8.0}}
    code, error, _ = train(tmp_path, options, {"ends": {"2": [5, "SIGSTOP"]}})
    assert code == 1
    assert re.search(r"^rank 2 \(process \d+\) is stopped at:$", error, re.MULTILINE)
    assert error.splitlines()[-1].startswith("rank 2 hangs: rank")


def test_a_worker_that_is_stopped_between_epochs_ends_a_run_of_common_steps(tmp_path: Path) -> None:
    strategy = {"timeout_seconds": 8.0, "max_staleness": 0}  # expires
    options = {"devices": 2, "max_epochs": 2, "strategy_options": strategy}
    code, error, _ = train(tmp_path, options, {"stops": 1})
    assert code == 1
    assert re.search(r"^rank 1 \(process \d+\) is stopped at:$", error, re.MULTILINE)
    assert error.splitlines()[-1].startswith("rank 1 hangs: rank 0 timed out (")


def test_a_signal_saves_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    options = {"devices": 3, "max_epochs": 3, "strategy_options": {"max_staleness": 4}}
    subject = {"seconds": {"0": 0.1, "1": 0.2}, "ends": {"2": [STEPS + 2, "SIGUSR1"]}}
    code, error, values = train(tmp_path, options, subject)
    assert code == 128 + signal.SIGUSR1, error
    saved = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    stopped = int(saved.name.removeprefix("step-"))
    assert STEPS + 2 <= stopped <= STEPS + 2 + 5  # the fastest worker was so far ahead
    assert len(values["loss"]) == stopped
    code, error, values = train(tmp_path, {**options, "resume": str(tmp_path / "run")}, {})
    assert code == 0, error
    assert len(values["loss"]) == 3 * STEPS
    assert values["samples"] == [SAMPLES] * 3


def test_a_resumed_run_has_the_saved_weights(tmp_path: Path) -> None:
    options = {"devices": 3, "max_epochs": 2}
    code, error, _ = train(tmp_path, options, {})
    assert code == 0, error
    first = load_file(tmp_path / "weights.safetensors")
    code, error, _ = train(tmp_path, {**options, "resume": str(tmp_path / "run")}, {})
    assert code == 0, error
    again = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
