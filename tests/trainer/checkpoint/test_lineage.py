"""What a run has saved stays its own: resumed, refused, overwritten, or out of disk space."""

import json
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from my_project_trainer import errors
from my_project_trainer.checkpoint import run_directory
from tests.project import PATIENCE, fit
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import fitting
from checkpoint_subject import rewrite
from processes import running, told_in, wait_for


class Model(fitting.Descends, by=torch.optim.Adam, lr=0.05):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self.network(batch[0]), batch[0].sum(1, keepdim=True))
        self.log("loss", loss, on_epoch=False)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x), batch_size=4)


def train(root: Path, name: str | None = "run", width: int = 4, **options: Any) -> Any:
    shown = {"loggers": ["csv"], "log_every_n_steps": 1, "max_steps": 6, "run_name": name}
    saves = {"checkpoint_every_n_steps": 1, "keep_checkpoints": 100}
    return fitting.fit(Model(width), root, **{**shown, **saves, **options})


def steps(directory: Path) -> list[int]:
    return [run_directory.step_of(path) for path in run_directory.complete(directory)]


def content(run: Path) -> dict[str, Any]:
    """Every file of a run but its lock, with the time of its last change."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder)
    return folder


@pytest.fixture
def root(_trained: Path, tmp_path: Path) -> Path:
    """A directory of runs with one run of six steps, all of them saved."""
    shutil.copytree(_trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_an_earlier_step_is_resumed_on_a_line_of_its_own(root: Path, capsys: Any) -> None:
    run = root / "run"
    early = run / "checkpoints" / "step-00000002"
    train(root, None, resume=str(early), max_steps=4, keep_checkpoints=2)
    said = capsys.readouterr().err.splitlines()
    assert "" not in said
    assert steps(run / "checkpoints") == [3, 4]
    aside = run / "checkpoints" / "abandoned-1"
    assert steps(aside) == [3, 4, 5, 6]
    assert f"note: resumed from {early}" in said
    notes = [line for line in said if "set aside" in line]
    expected = [f"note: later checkpoint set aside: {path}" for path in sorted(aside.iterdir())]
    assert notes == expected
    # The next resume takes the new line, and the log is that of a run without the old one.
    train(root, "run", resume="auto", max_steps=4)
    assert (
        "note: no step is left: max_epochs or max_steps is reached; set more"
        in capsys.readouterr().err
    )
    assert steps(run / "checkpoints") == [3, 4]
    train(root, "four", max_steps=4)
    logs = [(root / name / "metrics.csv").read_bytes() for name in ("run", "four")]
    assert logs[0] == logs[1]


def test_a_refused_resume_changes_nothing(root: Path) -> None:
    before = content(root / "run")
    with pytest.raises(errors.CheckpointError, match="does not match this model"):
        train(root, resume="auto", width=5)
    assert content(root / "run") == before


def test_a_refused_start_leaves_an_overwritten_run_whole(root: Path) -> None:
    before = content(root / "run")
    other = root / "other"
    train(root, "other", width=5)
    with pytest.raises(errors.CheckpointError, match="does not match this model"):
        train(root, overwrite=True, resume=str(other))
    assert content(root / "run") == before


def test_attempts_are_told_with_what_they_resumed_from(root: Path) -> None:
    train(root, resume="auto", max_steps=7)
    train(root, resume="auto", max_steps=8)
    attempts = json.loads((root / "run" / "run.json").read_text())["attempts"]
    sources = [attempt["resumed_from"] for attempt in attempts]
    checkpoints = root / "run" / "checkpoints"
    assert sources == [None, str(checkpoints / "step-00000006"), str(checkpoints / "step-00000007")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["tensorboard", "csv"], ["csv", "tensorboard"]),
        (["csv", "tensorboard"], ["csv"]),
        (["tensorboard", "csv"], ["csv"]),
    ],
)
def test_loggers_are_resumed_by_name(tmp_path: Path, first: list[str], second: list[str]) -> None:
    train(tmp_path, loggers=first, max_steps=4)
    train(tmp_path, loggers=second, resume="auto")
    logged_steps = [step for step, *_ in fitting.rows(tmp_path / "run")]
    assert logged_steps == sorted(2 * [1, 2, 3, 4, 5, 6])


def test_a_logger_that_the_checkpoint_does_not_know_keeps_what_it_had(tmp_path: Path) -> None:
    train(tmp_path, max_steps=3)
    train(tmp_path, loggers=[], resume="auto", max_steps=4)
    train(tmp_path, resume="auto")
    assert [step for step, *_ in fitting.rows(tmp_path / "run")] == [1, 1, 2, 2, 3, 3, 5, 5, 6, 6]


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_resumed(root, capsys):
    metrics = (root / "run" / "metrics.csv").read_bytes()
    newest = root / "run" / "checkpoints" / "step-00000006"
    file = newest / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    train(root, resume="auto")
    said = capsys.readouterr().err.splitlines()
    size = file.stat().st_size if file.exists() else 0
    assert said[0].startswith(f"note: damaged, and not used: {newest}: {file.name} has ") or size
    assert f"note: resumed from {newest.with_name('step-00000005')}" in said
    assert steps(root / "run" / "checkpoints")[-2:] == [5, 6]
    assert (root / "run" / "metrics.csv").read_bytes() == metrics


def test_values_that_cannot_be_are_refused(root: Path) -> None:
    newest = root / "run" / "checkpoints" / "step-00000006"
    state_text = (newest / "state.json").read_text()
    for name, value, told in [
        ("epoch", -1, "epoch is -1, not a whole number from 0 to"),
        ("epoch", 10**30, "epoch is 1000"),
        ("epoch", None, "epoch is None"),
        ("global_step", 5, "global_step is 5, not a whole number from 6 to 6"),
        ("step_in_epoch", "2", "step_in_epoch is '2'"),
        ("samples_per_step", -4, "samples_per_step is -4"),
        ("validated_at", 7, "validated_at is 7"),
    ]:

        def change(record: Any, name: str = name, value: object = value) -> Any:
            record["state"]["position"][name] = value
            return record

        rewrite(newest, change)
        with pytest.raises(errors.CheckpointError) as raised:
            train(root, resume=str(newest))
        (line,) = raised.value.problems
        assert line.startswith(f"{newest}: does not match this model (ValueError: {told}")
        (newest / "state.json").write_text(state_text)
    # Gradients are for manual optimization alone; earlier checkpoints have none of the others.
    optional = {"gradients", "callbacks", "configured", "frozen", "fresh"}
    for key in json.loads(state_text)["content"]["state"].keys() - optional:

        def drop(record: Any, key: str = key) -> Any:
            del record["state"][key]
            return record

        rewrite(newest, drop)
        with pytest.raises(errors.CheckpointError, match="does not match this model"):
            train(root, resume=str(newest))
        (newest / "state.json").write_text(state_text)


@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
def test_a_save_that_fails_at_preemption_is_told(tmp_path: Path, processes: int) -> None:
    arguments = fit(
        *("--model", "preemption_subject.Slow", "--trainer.loggers", "[csv]"),
        *("--trainer.devices", str(processes), "--trainer.accelerator", "cpu"),
        *("--trainer.default_root_dir", tmp_path, "--trainer.run_name", "run"),
        *("--trainer.max_epochs", "100", "--trainer.resume", "auto"),
    )
    log = tmp_path / "run" / "metrics.csv"
    # Forked by a server, ranks would not be the process' children.
    with running(arguments, tmp_path, extra=told_in(tmp_path), fresh=processes > 1) as process:
        wait_for(lambda: log.exists() and log.stat().st_size >= 30, process)
        # The kernel refuses what makes a file larger, as it does where a disk is full.
        for child in [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]:
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (2000, 2000))
        process.send_signal(signal.SIGUSR1)
        output, error = process.communicate(timeout=PATIENCE)
    line = "cannot be saved: File too large (rank 0); there is no checkpoint yet"
    assert process.returncode == 75, output
    assert line in error
    assert (tmp_path / "outcome").read_text().startswith("failed ")
    assert line in (tmp_path / "outcome").read_text()
    assert list((tmp_path / "run" / "checkpoints").glob(".*")) == []
