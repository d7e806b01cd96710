"""The directory of a run: its name, its record, the output of its ranks."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from my_project_trainer import errors
from my_project_trainer.checkpoint import run_directory as runs
from my_project_trainer.checkpoint.run_lock import RunLock
from my_project_trainer.launch import files


@pytest.mark.parametrize("name", [None, "a", "Run-1.2_b", "2026", "x" * 128])
def test_a_name(name: str | None) -> None:
    runs.check_name(name)


@pytest.mark.parametrize(
    "name", ["", "../up", "a/b", ".hidden", "-option", "a b", "a\n", "ü", "x" * 129]
)
def test_a_name_that_is_refused(name: str) -> None:
    with pytest.raises(errors.ConfigurationError) as raised:
        runs.check_name(name)
    rule = "use at most 128 letters, digits, '.', '_' and '-', a letter or digit first"
    problem = f"run_name={name!r}: {rule}"
    assert raised.value.problems == [problem]


def test_a_run_without_a_name_has_a_new_directory_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.time, "strftime", lambda _: "20260102-030405")
    made = [runs.create(tmp_path / "runs", None) for _ in range(3)]
    assert [path.name for path in made] == [
        "20260102-030405",
        "20260102-030405-2",
        "20260102-030405-3",
    ]
    assert all(path.is_dir() for path in made)


def test_an_existing_directory_is_reused(tmp_path: Path) -> None:
    first = runs.create(tmp_path, "mine")
    (first / "kept").touch()
    assert runs.create(tmp_path, "mine") == first
    assert (first / "kept").exists()


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.ConfigurationError) as raised:
        runs.create(tmp_path, "file")
    line = f"{tmp_path / 'file'} is a file or a dead link, no folder"
    assert raised.value.problems == [line]
    with pytest.raises(errors.ConfigurationError) as raised:
        runs.create(tmp_path / "file" / "runs", None)
    (line,) = raised.value.problems
    assert line.endswith("cannot be written (Not a directory)")


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(tmp_path: Path) -> None:
    target, lock = tmp_path / "target", tmp_path / ".lock"
    target.write_text("precious")
    lock.symlink_to(target)
    with pytest.raises(errors.UserError) as raised:
        RunLock().acquire(tmp_path)
    assert raised.value.problems == [f"{lock}: cannot be written (it is a link; remove it)"]
    assert target.read_text() == "precious"


def test_attempts_are_appended_and_their_configurations_kept(tmp_path: Path) -> None:
    for index, text in enumerate(["a: 1\n", "a: 1\n", "a: 2\n", "a: 3\n"]):
        runs.write_record(tmp_path, {"index": index}, text)
    record = json.loads((tmp_path / "run.json").read_text())
    assert [attempt["index"] for attempt in record["attempts"]] == [0, 1, 2, 3]
    texts = {path.name: path.read_text() for path in tmp_path.glob("config*")}
    assert texts == {"config.yaml": "a: 3\n", "config.2.yaml": "a: 1\n", "config.3.yaml": "a: 2\n"}


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", '{"attempts": 5}', '{"attempts": [5]}'])
def test_a_record_that_is_none_is_begun_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert runs.attempts(tmp_path) == []
    runs.write_record(tmp_path, {"resumed_from": "there"})
    assert [attempt["resumed_from"] for attempt in runs.attempts(tmp_path)] == ["there"]


def test_clearing_leaves_what_training_has_not_written(tmp_path: Path) -> None:
    for name in (
        *("run.json", "config.yaml", "config.1.yaml", "metrics.csv", "speed.csv", "mine.csv"),
        "test.json",
    ):
        (tmp_path / name).touch()
    for name in ("checkpoints", "tensorboard", "logs", "figures"):
        (tmp_path / name / "inside").mkdir(parents=True)
    assert runs.holds_run(tmp_path)
    runs.clear(tmp_path, with_records=False)
    kept = {"run.json", "config.yaml", "config.1.yaml", "mine.csv", "test.json", "logs", "figures"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    runs.clear(tmp_path, with_records=True)
    kept -= {"run.json", "config.yaml", "config.1.yaml"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert not runs.holds_run(tmp_path)


def test_a_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "text"
    files.write_atomically(path, "old")
    with path.open() as reader:
        files.write_atomically(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_output_goes_to_a_file_for_a_while(tmp_path, capfd):
    log = tmp_path / "logs" / "rank-1.log"
    log.parent.mkdir()
    log.write_text("of an earlier run\n")
    for word in ("first", "second"):
        with runs.output_to(log):
            os.write(1, f"{word} out\n".encode())
            os.write(2, f"{word} err\n".encode())
            subprocess.run(["echo", f"{word} child"], check=True)
            kept = logging.StreamHandler(sys.stdout)
    kept.emit(logging.makeLogRecord({"msg": "after"}))
    assert log.read_text().split("\n") == [
        *("of an earlier run", "first out", "first err", "first child"),
        *("second out", "second err", "second child", ""),
    ]
    assert capfd.readouterr().out == "after\n"


def test_output_comes_back_after_an_error(tmp_path, capfd):
    with pytest.raises(KeyError), runs.output_to(tmp_path / "log"):
        raise KeyError
    os.write(2, b"here\n")
    assert capfd.readouterr().err == "here\n"
