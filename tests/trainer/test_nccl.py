"""How a run ends whose ranks are over NCCL, as far as that can be simulated on CPUs."""

import json
import signal
import subprocess
from typing import Any

import pytest
import torch
from my_project_trainer.launch.failures import nccl_watch, watcher
from my_project_trainer.launch.failures import reports as failures
from my_project_trainer.strategies import process_group
from tests.project import PATIENCE, fit, run

from processes import assert_nothing_left, at_root

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
ERROR = "rank 1: ArithmeticError: planted on rank 1"


def command(name: str, strategy: str, *arguments: str) -> list[str]:
    """A fit on two processes, started by us, or by torchrun."""
    shared = fit(
        *("--model", f"nccl_subject.{name}", "--trainer.default_root_dir", "runs"),
        *("--trainer.max_steps", "4", "--trainer.loggers", "[]", "--trainer.accelerator", "cpu"),
        *arguments,
    )
    if strategy == "torchrun":
        return [*TORCHRUN, *map(str, shared)]
    return [*map(str, shared), "--trainer.strategy", strategy, "--trainer.devices", "2"]


@pytest.mark.parametrize(
    "strategy", ["ddp", "torchrun", pytest.param("ddp_spawn", marks=pytest.mark.slow), "ddp_fork"]
)
@pytest.mark.slow
def test_a_rank_that_raises_ends_the_run_though_its_group_cannot_be_destroyed(tmp_path, strategy):
    done = run(command("OverNCCL", strategy), cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    assert ERROR in done.stderr
    assert "killed" not in done.stderr
    assert (tmp_path / "at exit").exists()
    assert_nothing_left(tmp_path)


def test_an_error_is_shown_before_the_abort_of_a_peer_that_lost_the_rank(tmp_path):
    done = run(command("Aborts", "ddp"), cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == ERROR
    assert "SIGABRT" not in done.stderr


def test_a_rank_that_was_killed_is_shown_before_the_abort_of_its_peer(tmp_path):
    done = run(command("AbortsBeside", "ddp_fork"), cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    last = "rank 1 was killed by SIGKILL; if nobody sent it, memory ran out"
    assert done.stderr.splitlines()[-1] == last


@pytest.mark.slow
def test_a_collective_that_does_not_complete_is_told_with_the_rank_that_hangs(tmp_path):
    arguments = command("Hangs", "ddp", "--trainer.strategy_options", "{timeout_seconds: 5}")
    done = run([*arguments, "--trainer.run_name", "run"], cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == (
        "rank 1 hangs: rank 0 timed out (nccl:all_reduce did not complete within 5 s; the "
        "strategy's timeout_seconds sets how long)"
    )
    assert [line for line in lines if line.endswith(" in wait_for_ever")]
    assert [line for line in lines if line.endswith(" in wait_in_silence")]
    assert "Traceback" not in done.stderr
    record = json.loads((tmp_path / "runs" / "run" / "logs" / "nccl-rank-0.json").read_text())
    assert record["pg_status"]["0"]["last_enqueued_collective"] == "8"
    assert_nothing_left(tmp_path)


class Recorder:
    """torch's flight recorder of one group."""

    def __init__(self) -> None:
        self.enqueued, self.completed, self.retired = 7, 7, False

    def __call__(self, collectives: bool, active: bool) -> bytes:
        status = {"last_enqueued_collective": str(self.enqueued)}
        status |= {"last_completed_collective": str(self.completed), "last_started": "?"}
        entry = {"profiling_name": "nccl:broadcast", "retired": self.retired}
        found: dict[str, Any] = {"pg_status": {"0": status}}
        return json.dumps(found | ({"entries": [entry]} if collectives else {})).encode()


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    recorders = torch._C._distributed_c10d
    monkeypatch.setattr(recorders, "_dump_nccl_trace_json", made, raising=False)
    monkeypatch.setattr(nccl_watch, "_set_nccl_timeout", lambda seconds: None)
    return made


@pytest.fixture
def watch(recorder):
    made = nccl_watch.NCCLWatch(0, 10.0, lambda what: None, lambda: None)
    made.close()  # its thread: what is asked here is asked at made-up times
    return made


def test_a_collective_hangs_when_nothing_has_changed_for_as_long(watch, recorder):
    assert watch.hung(0.0) is None
    recorder.enqueued = 8
    assert watch.hung(100.0) is None
    assert watch.hung(109.9) is None
    assert watch.hung(110.0) == "nccl:broadcast"


def test_a_collective_that_goes_on_does_not_hang(watch, recorder):
    for now in range(0, 100, 5):
        recorder.enqueued, recorder.completed = now + 2, now
        assert watch.hung(float(now)) is None


def test_a_rank_that_is_busy_with_something_else_does_not_hang(watch, recorder):
    for now in (0.0, 50.0, 100.0):
        assert watch.hung(now) is None
    recorder.enqueued, recorder.retired = 8, True  # done, though the last count says otherwise
    for now in (101.0, 200.0, 300.0):
        assert watch.hung(now) is None


def test_the_thread_ends_the_process_once(recorder, monkeypatch, tmp_path):
    recorder.enqueued = 8
    told: list[str] = []
    watch = nccl_watch.NCCLWatch(3, 0.05, told.append, lambda: tmp_path / "logs")
    watch._thread.join(60)
    watch.close()
    assert told == ["nccl:broadcast did not complete within 0.05 s"]
    assert json.loads((tmp_path / "logs" / "nccl-rank-3.json").read_text())["pg_status"]


def test_a_build_of_torch_without_nccl_records_nothing():
    assert nccl_watch._recorded() == {}


@pytest.mark.parametrize(
    ("backends", "size", "waits"),
    [
        ("cpu:gloo,cuda:nccl", 2, True),
        ("nccl", 2, True),
        ("cpu:gloo,cuda:nccl", 1, False),
        ("cpu:gloo,cuda:gloo", 2, False),
    ],
)
def test_over_nccl_alone_the_end_of_a_group_waits_for_peers(monkeypatch, backends, size, waits):
    group = process_group.dist
    monkeypatch.setattr(group, "is_initialized", lambda: True)
    monkeypatch.setattr(group, "get_world_size", lambda: size)
    monkeypatch.setattr(group, "get_backend_config", lambda: backends)
    assert process_group.ProcessGroupStrategy().waits_for_peers() is waits


def test_a_failure_that_was_caught_is_not_shown_later(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_FAILURE_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINER_PARENT_PID", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TRAINER_RANK_PID", "1")
    monkeypatch.setattr(failures, "_hide_traceback", lambda error: None)
    monkeypatch.setattr(failures.interruption, "hide_keyboard_interrupt", lambda: None)
    failures.report_failure(ArithmeticError("caught"), is_final=True)
    assert failures.first_report(tmp_path).message.endswith("rank 1: ArithmeticError: caught")
    assert failures.final(tmp_path) == [1]
    failures.report_start()
    assert failures.first_report(tmp_path) is None
    failures.report_failure(ArithmeticError("not caught"))
    assert failures.final(tmp_path) == []


def test_the_launcher_acts_on_a_report_before_its_rank_has_ended(tmp_path):
    report = {"rank": 0, "time": 1.0, "code": 3, "message": "told", "is_user_error": False}
    ranks: list[subprocess.Popen[bytes]] = []

    def start() -> list[subprocess.Popen[bytes]]:
        ranks.append(subprocess.Popen(["sleep", "1000"], process_group=0))
        (tmp_path / "rank-0.json").write_text(json.dumps(report | {"is_final": True}))
        return ranks

    place = watcher.Place(1, tmp_path)
    found = watcher.Watcher(start, "fork", place, grace_seconds=0.1).watch()
    assert (found.rank, found.code, found.message) == (0, 3, "told")
    assert ranks[0].wait(PATIENCE) == -signal.SIGTERM
