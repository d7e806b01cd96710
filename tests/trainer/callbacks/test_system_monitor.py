"""System values of a fit: when they are read, where they are logged, and what cannot be read."""

import importlib.util
import time
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
import psutil
import pytest
import torch
from my_project_trainer.callbacks import SystemMonitor, measuring
from torch import Tensor

import callback_subject as subject
import fitting
import logger_subject

NAMES = {"system/cpu_percent", "system/memory_percent", "system/disk_free_gib"}


class Waits(subject.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.011)
        return super().training_step(batch, batch_idx)


def fit(monitor: SystemMonitor, folder: Path) -> Any:
    bare = logger_subject.Bare()
    shared = {"max_steps": 3, "log_every_n_steps": 2, "callbacks": [monitor]}
    return fitting.fit(Waits(), folder, loggers=["csv", bare], **shared), bare


def test_values_are_logged_with_the_speed(tmp_path: Path) -> None:
    made, bare = fit(SystemMonitor(0.01), tmp_path)
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


def test_values_are_not_read_again_before_their_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now[0])
    monitor = SystemMonitor(10.0)
    monitor._readers = {"system/one": lambda: 1.0}
    values = []
    for now[0] in (0.0, 9.9, 10.0, 19.9, 25.0, 34.9):
        values.append(monitor._read())
    one = {"system/one": 1.0}
    assert values == [one, {}, one, {}, one, {}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="its values can be read")
def test_what_cannot_be_read_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    monitor = SystemMonitor(1e-9)
    monitor._readers = measuring._readers(torch.device("cuda", 0), tmp_path)
    assert len(monitor._readers) == 7
    assert monitor._read().keys() == NAMES
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "warning: SystemMonitor does not log system/gpu_percent, system/gpu_memory_gib, "
        "system/gpu_power_watts, system/gpu_temperature: "
    )
    assert monitor._read().keys() == NAMES
    assert capfd.readouterr().err == ""


def test_mistakes_are_refused_and_psutil_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(trainer.ConfigurationError) as caught:
        SystemMonitor(float("nan"))
    assert caught.value.problems == [
        "SystemMonitor: every_n_seconds=nan: give a number above 0",
        "SystemMonitor: psutil is not installed: pip install psutil",
    ]
