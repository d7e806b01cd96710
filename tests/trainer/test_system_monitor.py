"""System values of a fit: what is logged where, when the thread ends, and what cannot be read."""

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import psutil
import pytest
import torch
from my_project_trainer.callbacks import SystemMonitor, system_monitor
from tests.project import PATIENCE
from torch import Tensor

import callback_subject as subject
import logger_subject

NAMES = {"system/cpu_percent", "system/memory_percent", "system/disk_free_gib"}


class Waits(subject.Net):
    """Each step waits for a new reading."""

    def __init__(self, monitor: SystemMonitor, error: BaseException | None) -> None:
        super().__init__()
        self.monitor, self.error = monitor, error

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        deadline = time.monotonic() + PATIENCE
        while not self.monitor._newest:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if self.error is not None:
            raise self.error
        return super().training_step(batch, batch_idx)


def fit(monitor: SystemMonitor, folder: Path, error: BaseException | None = None) -> Any:
    bare = logger_subject.Bare()
    made = trainer.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_steps": 3, "log_every_n_steps": 2},
        **{"callbacks": [monitor], "loggers": ["csv", bare], "run_name": "run"},
        **{"enable_progress_bar": False, "default_root_dir": folder},
    )
    made.fit(Waits(monitor, error))
    return made, bare


def running() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "system-monitor"]


def test_values_are_logged_with_the_speed_and_the_thread_ends_with_the_fit(tmp_path: Path) -> None:
    made, bare = fit(SystemMonitor(0.01), tmp_path)
    assert running() == []
    written = [(step, values) for step, _, values in bare.kept if "speed/data_wait" in values]
    assert [step for step, _ in written] == [1, 2, 3]
    for _, values in written:
        assert {name for name in values if name.startswith("system/")} == NAMES
        assert 0 <= values["system/cpu_percent"] <= 100
        assert 0 < values["system/memory_percent"] <= 100
        assert 0 < values["system/disk_free_gib"] < psutil.disk_usage(str(tmp_path)).total / 2**30
    assert not NAMES & made.metrics.keys()
    folder = tmp_path / "run"
    assert "system/" in (folder / "speed.csv").read_text()
    assert "system/" not in (folder / "metrics.csv").read_text()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_thread_ends_with_a_fit_that_does_not(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error, match="no more"):
        fit(SystemMonitor(0.01), tmp_path, error("no more"))
    deadline = time.monotonic() + PATIENCE
    while running() and error is not OSError:  # of which callbacks are told
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert running() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="its values can be read")
def test_what_cannot_be_read_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    readers = system_monitor._readers(torch.device("cuda", 0), tmp_path)
    assert len(readers) == 7
    assert system_monitor._read(readers).keys() == NAMES
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "warning: SystemMonitor does not log system/gpu_percent, system/gpu_memory_gib, "
        "system/gpu_power_watts, system/gpu_temperature: "
    )
    assert system_monitor._read(readers).keys() == NAMES
    assert capfd.readouterr().err == ""


def test_mistakes_are_refused_and_psutil_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(trainer.ConfigurationError) as caught:
        SystemMonitor(float("nan"))
    assert caught.value.problems == [
        "SystemMonitor: every_n_seconds=nan: give a number above 0",
        "SystemMonitor needs psutil: pip install psutil",
    ]
