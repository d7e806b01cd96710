"""Failure reports: which of two is the first, and what torchelastic's own files tell of them."""

import json
import time

import pytest
from my_project_trainer.errors import UserError
from my_project_trainer.launch import failures

# A rank fails, and a fraction of a second later another one, which has lost it.
MOMENTS = {1: 100.2, 0: 100.7}


def _fail(rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: MOMENTS[rank])
    monkeypatch.setenv("RANK", str(rank))
    try:
        raise error
    except Exception as raised:
        failures.report_failure(raised)


def test_the_first_of_two_failures_within_a_second_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_FAILURE_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINER_PARENT_PID", "1")
    monkeypatch.setattr(failures.signals, "hide_traceback", lambda is_hidden: None)
    for rank in MOMENTS:
        _fail(rank, UserError(f"from {rank}"), monkeypatch)
    first = failures.failures(tmp_path)[0]
    assert (first.rank, first.code, first.problems) == (1, 2, ["from 1"])


@pytest.mark.parametrize(
    ("peer", "seconds"),
    [
        ([], 8),
        (["error.json"], 60),  # it has failed, and has to end yet
        (["lost-a-peer"], 8),
        (["lost-a-peer", "error.json"], 8),
    ],
)
def test_a_rank_that_lost_a_peer_lets_it_end_first(tmp_path, monkeypatch, peer, seconds):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    for name in peer:
        (tmp_path / "0" / name).touch()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    monkeypatch.setattr(failures.collectives, "world_size", lambda: 2)
    slept = [0.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(failures.time, "sleep", slept.append)
    failures.report_failure(RuntimeError("Connection closed by peer"))
    assert sum(slept) == pytest.approx(seconds, abs=0.2)
    assert {path.name for path in (tmp_path / "1").iterdir()} == {"error.json", "lost-a-peer"}


def test_under_torchelastic_its_own_format_has_the_line_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    _fail(1, UserError("give a smaller number"), monkeypatch)
    line = "rank 1: error: give a smaller number"
    assert json.loads((tmp_path / "error.json").read_text()) == {
        "message": {"message": line, "extraInfo": {"py_callstack": line, "timestamp": "100"}}
    }
