"""What happens to a run's machine: a full disk, a removed directory, a killed worker. One line."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Logger, TrainingModule
from my_project_trainer.callbacks import SystemMonitor
from my_project_trainer.errors import UserError
from my_project_trainer.launch import collectives
from tests.project import run
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fitting import Descends, fit
from processes import at_root

SMALL = "16k"
KILLED = (
    r"DataLoader worker \(pid(\(s\))? \d+\) (is killed by signal: Killed|exited unexpectedly); "
    "if nobody killed it, memory ran out: give the loader fewer num_workers; "
    "see docs/trouble.md#a-loader-worker-was-killed"
)


class Model(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.weight * batch[0]).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2)


class Removes(Model):
    """Removes its run's directory in the third step, or at the end, after the last save."""

    def __init__(self, at_end: bool = False) -> None:
        super().__init__()
        self.at_end = at_end

    def remove(self) -> None:
        while self.trainer.run_directory.exists():  # a thread may be writing run.json in it
            shutil.rmtree(self.trainer.run_directory, ignore_errors=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and not self.at_end:
            self.remove()
        return super().training_step(batch, batch_idx)

    def on_fit_end(self) -> None:
        if self.at_end:
            self.remove()


class Crowded(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2, num_workers=99_999)


class Fragile(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(1)


class Workers(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(Fragile(), batch_size=2, num_workers=2)


def train(module: TrainingModule, root: Path, **options: Any) -> None:
    shared = {"max_epochs": 1, "loggers": ["csv"], "deterministic": True}
    fit(module, root, **shared | options)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[None]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


_FULL = """
import sys, test_machine
from pathlib import Path
test_machine.train(test_machine.Model(), Path(sys.argv[1]), log_every_n_steps=1)
"""


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "full later"])
def test_a_full_disk_is_one_line(tmp_path: Path, is_full: bool) -> None:
    with small_disk(tmp_path / "disk"):
        if is_full:
            (tmp_path / "disk" / "file").write_bytes(bytes(1 << 14))
        done = run(["-c", _FULL, tmp_path / "disk"], cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
    assert sum("No space left on device" in line for line in lines) == 1
    assert str(tmp_path / "disk") in lines[-1]
    assert not any(line.startswith("Exception in thread") for line in lines)


@pytest.mark.parametrize(("every", "at_end"), [(None, False), (1, False), (None, True)])
def test_a_removed_run_directory_ends_the_run_with_a_line(tmp_path, every, at_end):
    with pytest.raises(UserError, match=r"was removed (.* no checkpoint$|while )") as raised:
        train(Removes(at_end), tmp_path, checkpoint_every_n_steps=every)
    assert len(raised.value.problems) == 1
    assert not (tmp_path / "run").exists()


def test_a_killed_worker_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        train(Workers(), tmp_path)
    assert re.fullmatch(KILLED, str(raised.value))


class Stuck(Fragile):
    """Its workers wait for something that does not come, if any sample is read in one."""

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(600)
        raise AssertionError("the run has waited for it")


@pytest.mark.slow
@pytest.mark.parametrize(("timeout", "said"), [(0, "3 s: they hang, or need a longer"), (1, "1 ")])
def test_workers_that_read_nothing_end_the_run(tmp_path, monkeypatch, timeout, said):
    """Within a limit of the trainer, or the user's, whose error is torch's."""
    monkeypatch.setattr(collectives, "timeout_seconds", 1.0)
    module = Workers()
    loader = DataLoader(Stuck(), batch_size=2, num_workers=2, timeout=timeout)
    monkeypatch.setattr(module, "train_dataloader", lambda: loader)
    with pytest.raises(RuntimeError if timeout else UserError, match=said):
        train(module, tmp_path)


def test_workers_meet_if_tmpdir_is_too_long_for_a_socket(tmp_path, monkeypatch):
    folder, module = tmp_path / ("x" * 100), Workers()
    loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2, num_workers=2)
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(module, "train_dataloader", lambda: loader)
    monkeypatch.setitem(config, "tempdir", None)
    train(module, tmp_path)
    assert [*folder.iterdir()] == []


class Unreachable(Dataset[Any]):
    """Its samples connect to a process that is gone, as tensors in shared memory may."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self.is_due = is_due

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        threading.Thread(target=self.kill, daemon=True).start()
        return self

    def kill(self) -> None:
        time.sleep(0.2)  # the sample is sent first
        while not self.is_due():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def __reduce__(self) -> Any:
        return Client, (("127.0.0.1", 1),)


class LosesWorker(Model):
    """Its worker is unreachable, and killed when it ``is_due``."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        super().__init__()
        self.is_due = is_due

    def train_dataloader(self) -> Any:
        return DataLoader(Unreachable(self.is_due), num_workers=1, collate_fn=list)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_worker_that_was_killed_a_moment_ago_is_one_line(tmp_path: Path, is_killed: bool) -> None:
    with pytest.raises(UserError) as raised:
        train(LosesWorker(lambda: is_killed), tmp_path)
    line = str(raised.value)
    assert re.fullmatch(KILLED, line) if is_killed else line.startswith("DataLoader worker exited")


def wait_at(path: Path) -> None:
    """Wait until torch raises that a worker was killed, which one is when the path exists."""
    path.touch()
    time.sleep(60)


class Interrupted(Model):
    """Its worker is killed in the middle of :meth:`wait`, which torch interrupts by an error."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.path = directory / "is_waiting"

    def wait(self) -> None:
        if self.trainer.global_step > 0 and not self.path.exists():
            wait_at(self.path)

    def train_dataloader(self) -> Any:
        return DataLoader(KilledLater(self.path), batch_size=2, num_workers=2)


class KilledLater(Fragile):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: int) -> Tensor:
        while index == 5 and not self.path.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


class WaitingLogger(Logger):
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def write(self, step: int, epoch: int, values: Any) -> None:
        self.wait()


class WaitingOption(str):
    """An option of an optimizer, which waits while it is hashed."""

    wait: Callable[[], None]

    def __repr__(self) -> str:
        self.wait()
        return super().__repr__()


@pytest.mark.parametrize("place", ["logger", "monitor", "hashes"])
def test_a_killed_worker_is_told_whatever_it_interrupts(tmp_path, monkeypatch, place):
    module = Interrupted(tmp_path)
    options: dict[str, Any] = {"log_every_n_steps": 1, "record_hashes": False}
    if place == "logger":
        options["loggers"] = [WaitingLogger(module.wait)]
    elif place == "monitor":
        monkeypatch.setattr("psutil.cpu_percent", lambda: module.wait() or 0.0)
        options["callbacks"] = [SystemMonitor(every_n_seconds=1e-6)]
    else:
        option = WaitingOption()
        option.wait = module.wait
        optimizer = torch.optim.SGD([{"params": module.parameters(), "note": option}], lr=0.01)
        monkeypatch.setattr(module, "configure_optimizers", lambda: optimizer)
        options["record_hashes"] = True
    with pytest.raises(UserError) as raised:
        train(module, tmp_path, **options)
    assert re.fullmatch(KILLED, str(raised.value))
    assert "is killed by signal: Killed" in str(raised.value)
    assert (tmp_path / "is_waiting").exists()


class ClosingLogger(Logger):
    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call

    def write(self, step: int, epoch: int, values: Any) -> None:
        pass

    def close(self) -> None:
        self.call()


@pytest.mark.slow
def test_a_killed_worker_keeps_no_logger_from_being_closed(tmp_path, capsys):
    waiting, closed = tmp_path / "is_waiting", list[str]()

    def close_first() -> None:
        if not waiting.exists():
            wait_at(waiting)
        closed.append("first")

    second = ClosingLogger("second", lambda: closed.append("second"))
    loggers = [ClosingLogger("first", close_first), second]
    with pytest.raises(UserError) as raised:
        train(LosesWorker(waiting.exists), tmp_path, loggers=loggers)
    assert re.fullmatch(KILLED, str(raised.value))
    assert closed == ["second", "first"]  # which was interrupted, and closed again
    assert capsys.readouterr().err == ""


class Refused(Fragile):
    def __getitem__(self, index: int) -> Tensor:
        Client(("127.0.0.1", 1))
        raise AssertionError("a connection to port 1 is refused")


class Connects(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(Refused())


def test_a_connection_of_the_user_is_no_worker(tmp_path: Path) -> None:
    with pytest.raises(ConnectionRefusedError):
        train(Connects(), tmp_path)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_more_workers_than_a_machine_can_start_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_workers=99999: each is a process, and this machine"):
        train(Crowded(), tmp_path)


@pytest.mark.slow
@pytest.mark.needs("g++")
@pytest.mark.parametrize("meta_device", [False, True])
def test_what_takes_minutes_is_said_first(tmp_path: Path, capsys: Any, meta_device: bool) -> None:
    class Layered(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(self.weight * batch[0]).mean()

    options = {"compile": True, "meta_device": meta_device, "enable_progress_bar": True}
    train(Layered(), tmp_path, max_steps=1, **options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "compile: the first step compiles the model, which may take minutes"
