"""W&B and MLflow, with the real libraries, MLflow's own server, and without a network."""

import importlib
import importlib.util
import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.errors import UserError
from my_project_trainer.logging import LoggedRun
from my_project_trainer.logging.remote_loggers import MLflowLogger, RemoteLogger, WandbLogger
from tests.project import fit as fit_words
from tests.project import run, succeed
from torch.utils.data import DataLoader, TensorDataset

import fitting
import mlflow_server
from processes import at_root

LOADER: DataLoader[Any] = DataLoader(TensorDataset(torch.ones(4, 1)))
AT_4 = "runs/run/checkpoints/step-00000004"


def fit_options(logger: Any, **options: Any) -> str:
    shared = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "run_name": "run"}
    shared |= {"log_every_n_steps": 1, "checkpoint_every_n_steps": 2, "loggers": [logger, "csv"]}
    return json.dumps({**shared, **options})


def fit(folder: Path, logger: Any, **options: Any) -> dict[str, Any]:
    """Fit in a process of its own; the record of the run at the service."""
    done = run(["-m", "logger_subject", fit_options(logger, **options)], cwd=folder)
    assert "not used any more" not in done.stderr, done.stderr
    record = folder / "runs" / "run" / logger["class_path"] / "run.json"
    kept: dict[str, Any] = json.loads(record.read_text())
    return kept


def fit_and_resume(folder: Path, logger: dict[str, Any]) -> str:
    """Six steps, then eight of which those from the fifth on are trained again; the run's id."""
    first = fit(folder, logger, max_steps=6)
    # As a process that is killed while it writes leaves it.
    values = folder / "runs" / "run" / logger["class_path"] / "values.jsonl"
    with values.open("a") as file:
        file.write('[7, {"lo')
    second = fit(folder, logger, max_steps=8, resume=AT_4)
    assert first["id"] == second["id"]
    return str(first["id"])


def logged(folder: Path, name: str) -> list[float]:
    return fitting.logged(folder / "runs" / "run", name)


class Known(RemoteLogger):
    name = "service"

    def open(self, run: LoggedRun, known: str | None) -> str:
        return known or "new"

    def send(self, step: int, values: Mapping[str, float]) -> None: ...


@pytest.mark.parametrize("name", ["run.json", "values.jsonl"])
@pytest.mark.parametrize("damage", [b'{"id', b"[1, {\n", b'"\xff"\n', b"[1]\n", None])
def test_a_damaged_file_of_a_service_is_one_line(name, damage, tmp_path):
    logger, run = Known(), SimpleNamespace(directory=tmp_path)
    folder = tmp_path / logger.name
    folder.mkdir()
    if damage is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_bytes(damage)
    if (name, damage) == ("values.jsonl", b'{"id'):  # a line that a process was killed in
        logger.start(run)  # type: ignore[arg-type]
        logger.write(1, 0, {"epoch": 8.0})  # the user's, not the trainer's
        assert list(logger.sent()) == [(1, {"epoch": 8.0})]
        logger.close()
        return
    with pytest.raises(UserError) as caught:
        logger.start(run)  # type: ignore[arg-type]
    (line,) = caught.value.problems
    assert line.startswith(f"{folder}: run.json or values.jsonl cannot be read (")


@pytest.fixture(params=["database", "server"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "database":
        yield f"sqlite:///{tmp_path}/mlflow.db"
        return
    with mlflow_server.serving(tmp_path) as server:
        yield server.address


@pytest.mark.needs("mlflow")
def test_mlflow_continues_its_run_without_a_step_twice(store: str, tmp_path: Path) -> None:
    mlflow = importlib.import_module("mlflow")
    where = {"tracking_uri": store, "experiment": "mine"}
    known = fit_and_resume(tmp_path, {"class_path": "mlflow", "init_args": where})
    client = mlflow.MlflowClient(store)
    record = client.get_run(known)
    assert (record.info.run_name, record.info.status) == ("run", "FINISHED")
    assert record.data.params["trainer.max_steps"] == "6"
    for name in ("loss", "epoch", "speed/seconds_per_step"):
        steps = [entry.step for entry in client.get_metric_history(known, name)]
        assert sorted(steps) == list(range(1, 9))
    losses = sorted((point.step, point.value) for point in client.get_metric_history(known, "loss"))
    assert [value for _, value in losses] == logged(tmp_path, "loss")
    assert sorted(point.step for point in client.get_metric_history(known, "val_loss")) == [4, 6, 8]
    assert len(client.search_runs([record.info.experiment_id])) == 1


class Fails(fitting.Descends):
    """Logs a name that MLflow does not accept, and raises in its third step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log_dict({"recall@10": 0.5, "loss": float(batch_idx)})
        if batch_idx == 2:
            raise RuntimeError("broken")
        return self.layer(batch[0]).mean()


@pytest.mark.needs("mlflow")
def test_mlflow_knows_that_a_run_failed_and_one_bad_name_loses_no_other(tmp_path, capsys):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    options = {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "max_epochs": 1}
    options |= {"loggers": [MLflowLogger(tracking_uri=uri)], "default_root_dir": tmp_path}
    with pytest.raises(RuntimeError, match="broken"):
        trainer.Trainer(**options).fit(Fails(), LOADER)
    client = MlflowClient(uri)
    (failed,) = client.search_runs(["0"])
    assert failed.info.status == "FAILED"
    values = client.get_metric_history(failed.info.run_id, "loss")
    assert [value.value for value in values] == [0.0, 1.0]
    assert capsys.readouterr().err.count("leaves out 'recall@10'") == 1


@pytest.mark.needs("mlflow")
def test_training_continues_when_mlflow_s_server_is_killed(tmp_path: Path) -> None:
    with mlflow_server.serving(tmp_path) as server:
        # By itself, MLflow tries again for minutes.
        variables = {"MLFLOW_TRACKING_URI": server.address, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        options = fit_options({"class_path": "mlflow"}, max_steps=6)
        words = ["-m", "logger_subject", options, str(server.group)]
        done = run(words, cwd=tmp_path, extra=variables)
    assert done.returncode == 0, done.stderr
    [line] = [text for text in done.stderr.splitlines() if "not used any more" in text]
    assert line.startswith("warning: logger 'mlflow' is not used any more: ")
    assert server.address.removeprefix("http://").split(":")[0] in line
    assert len(logged(tmp_path, "loss")) == 6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("mlflow", "wandb")]
)
def test_a_server_that_does_not_answer_is_left_out(name: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # connects, and says nothing
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = {"MLFLOW_TRACKING_URI": address, "WANDB_BASE_URL": address}
        words = ["-m", "logger_subject", fit_options(name, max_steps=2)]
        done = run(words, cwd=tmp_path, extra={**variables, "WANDB_API_KEY": "0" * 40})
    assert done.returncode == 0, done.stderr
    line = (
        f"warning: logger '{name}' is not used any more: it raised ConnectionError: {address} does "
        "not answer within 5 s"
    )
    assert line in done.stderr.splitlines()
    assert len(logged(tmp_path, "loss")) == 2


def records(data: bytes) -> Iterator[bytes]:
    """Records of a W&B file: LevelDB's log format, after a header of seven bytes."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def parsed(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    for data in records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        yield record


def history(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for record in parsed(path):
        items = record.history.item
        rows.append({"".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


@pytest.mark.needs("wandb")
def test_wandb_s_newest_offline_folder_has_the_whole_run(tmp_path: Path) -> None:
    offline = {"mode": "offline", "project": "p"}
    known = fit_and_resume(tmp_path, {"class_path": "wandb", "init_args": offline})
    first, second = sorted(tmp_path.glob(f"runs/run/wandb/offline-run-*/run-{known}.wandb"))
    assert [row["step"] for row in history(first) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    rows = history(second)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 6, 8]
    assert [row["loss"] for row in rows if "loss" in row] == logged(tmp_path, "loss")


class Ends(Fails):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("step", 0.5)
        if batch_idx == 2:
            signal.raise_signal(signal.SIGTERM)
        return self.layer(batch[0]).mean()


@pytest.mark.needs("wandb")
@pytest.mark.parametrize(("kind", "code", "is_preempted"), [(Ends, 143, True), (Fails, 1, False)])
def test_wandb_knows_that_a_run_is_preempted(tmp_path, capsys, kind, code, is_preempted):
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": tmp_path}
    logger = WandbLogger(mode="offline")
    with pytest.raises((SystemExit, RuntimeError)) as raised:
        trainer.Trainer(**options, loggers=[logger]).fit(kind(), LOADER)
    assert getattr(raised.value, "code", 1) == code
    (path,) = tmp_path.rglob("run-*.wandb")
    kinds = [record.WhichOneof("record_type") or "" for record in parsed(path)]
    requests = [record.request.WhichOneof("request_type") for record in parsed(path)]
    assert ("preempting" in [*kinds, *requests]) == is_preempted
    assert ("one that is logged as 'step' is left out" in capsys.readouterr().err) == is_preempted
    assert 0.5 not in [row.get("step") for row in history(path)]


@pytest.mark.needs("wandb")
def test_wandb_records_no_secret_of_the_command(tmp_path: Path) -> None:
    into = ["--trainer.default_root_dir", tmp_path, "--trainer.run_name", "run"]
    short = ["--trainer.max_steps", "1", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    secret = ["--model", "launch_subject.Secretive", "--model.token=my-secret"]
    offline = {"WANDB_MODE": "offline"} | at_root()
    words = fit_words(*into, *short, *secret, "--trainer.loggers", "[wandb]")
    assert "not used any more" not in succeed(words, cwd=tmp_path, extra=offline).stderr
    files = {path for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file()}
    assert any(b"--model.token=***" in path.read_bytes() for path in files)
    assert not [path for path in files if b"my-secret" in path.read_bytes()]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_missing_is_refused(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    line = f"loggers: '{name}' needs the package {name}: make {name}, or pip install '.[{name}]'"
    with pytest.raises(trainer.ConfigurationError) as caught:
        trainer.Trainer(accelerator="cpu", loggers=[name])
    assert caught.value.problems == [line]
