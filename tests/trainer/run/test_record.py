"""What ``run.json`` says of an attempt: code, packages, data, hosts, variables, and its end."""

import json
import os
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import DataModule
from my_project_trainer.checkpoint import run_directory
from my_project_trainer.cli import command as cli
from my_project_trainer.options import redaction
from my_project_trainer.run import data_record, record
from test_reproduce import RUN, fit
from tests.project import ROOT

import reproduce_subject as subject


@pytest.fixture
def started(apart: None, tmp_path: Path) -> Path:
    subject.write_data(tmp_path / "data")
    return tmp_path


def attempts() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((RUN / "run.json").read_text())["attempts"]
    return records


def test_a_record_is_enough_to_run_again(started, monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    monkeypatch.setenv("NCCL_TOKEN", "a-secret")
    monkeypatch.setenv("SOME_TOKEN", "a-secret")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("IMAGE_DIGEST", "sha256:123")
    cli.main(fit())
    (attempt,) = attempts()
    assert attempt["directory"] == str(started)
    assert attempt["versions"]["torch"] == torch.__version__
    assert attempt["packages"]["torch"] == metadata.version("torch")
    assert attempt["locks"].keys() == {path.name for path in (ROOT / "requirements").glob("*.txt")}
    assert attempt["template"]["version"]
    assert attempt["image"] == {"commit": None, "digest": "sha256:123"}
    assert attempt["variables"].items() >= {
        ("OMP_PROC_BIND", "false"),
        ("NCCL_TOKEN", redaction.HIDDEN),
        ("SLURM_JOB_ID", "17"),
    }
    assert "a-secret" not in (RUN / "run.json").read_text()
    (host,) = attempt["hosts"]
    assert host["capability"] == torch.backends.cpu.get_cpu_capability()
    assert host["threads"] == torch.get_num_threads()
    assert (attempt["layout"]["world_size"], attempt["seed"], attempt["restarts"]) == (1, 0, 2)
    files = {Path(file["path"]).name: file for file in attempt["data"]}
    assert files.keys() == {"read.bin", "unread.bin"}
    digest = data_record.hash_of(started / "data" / "read.bin")
    assert (files["read.bin"]["bytes"], files["read.bin"]["sha256"]) == (96, digest)
    assert (attempt["first_step"], attempt["last_step"], attempt["exit_code"]) == (0, 12, 0)
    assert attempt["ended"] == "finished step 12"
    assert attempt["started"] <= attempt["ended_at"]
    assert attempt["metrics"].keys() == {"loss", "loss_epoch", "lr"}


def test_a_failed_attempt_says_its_exit_code(started, monkeypatch):
    monkeypatch.setenv("FAIL_IN", "7")
    with pytest.raises(SystemExit) as ended:
        cli.main(fit())
    (attempt,) = attempts()
    assert attempt["exit_code"] == ended.value.code == 1
    assert (attempt["ended"], attempt["last_step"]) == ("failed ValueError", 7)


def test_an_end_without_a_number_in_json() -> None:
    end = record.end(3, {"loss": float("nan"), "most": float("inf"), "lr": 0.5}, None)
    assert end["metrics"] == {"loss": "nan", "most": "inf", "lr": 0.5}
    assert json.loads(json.dumps(end, allow_nan=False)) == end


class Named(DataModule):
    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def data_files(self) -> Any:
        return self.paths


def listed(owner: DataModule, folder: Path) -> list[str]:
    files = data_record.files_in(folder / file for file in owner.data_files())
    return sorted(Path(entry["path"]).name for entry in files)


def test_files_are_attributes_or_what_the_hook_names(started):
    data = subject.Bytes("data")
    assert listed(data, folder=started) == ["read.bin", "unread.bin"]
    named = Named(started / "data" / "unread.bin", Path("nowhere"))
    assert listed(named, folder=started) == ["unread.bin"]
    # What cannot be read to its end is left out.
    os.mkfifo(started / "data" / "pipe")
    assert listed(data, folder=started) == ["read.bin", "unread.bin"]


def test_hashes_of_data_do_not_delay_the_end_of_a_run_that_is_stopped(started, monkeypatch):
    run_directory.write_record(started, {})
    reads = threading.Event()
    plain = data_record.hash_of

    def slow(path: Path, stopped: threading.Event) -> str | None:
        reads.set()
        stopped.wait()
        return plain(path, stopped)

    monkeypatch.setattr(data_record, "hash_of", slow)
    writing = data_record.DataRecord(started, [started / "data"])
    assert reads.wait(600)
    writing.end(wait=False)
    (attempt,) = run_directory.attempts(started)
    assert [file["sha256"] for file in attempt["data"]] == [None, None]


def test_files_beyond_a_number_are_left_out_and_beyond_a_size_not_hashed(started, monkeypatch):
    monkeypatch.setattr(data_record, "_MOST_BYTES", 100)
    for most in (2, 1):
        monkeypatch.setattr(data_record, "_MOST_FILES", most)
        run_directory.write_record(started, {})
        data_record.DataRecord(started, [started / "data"]).end(wait=True)
    both, one = run_directory.attempts(started)
    assert [file["sha256"] is None for file in both["data"]] == [False, True]
    assert len(one["data"]) == 1
    assert (both["data_cut"], one["data_cut"]) == (False, True)
