"""How a run ends whose ranks are over NCCL, as far as that can be simulated on CPUs."""

import re

import pytest
from my_project_trainer.launch import collectives, failures, reports
from tests.project import fit, run

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


@pytest.mark.slow
def test_an_error_is_shown_before_the_abort_of_a_peer_that_lost_the_rank(tmp_path):
    done = run(command("Aborts", "ddp"), cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == ERROR
    assert "SIGABRT" not in done.stderr


def test_a_rank_that_was_killed_is_shown_before_the_abort_of_its_peer(tmp_path):
    done = run(command("AbortsBeside", "ddp_fork"), cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    last = "rank 1 was killed by SIGKILL; if nobody sent it, memory ran out: "
    last += "see docs/trouble.md#a-rank-was-killed"
    assert done.stderr.splitlines()[-1] == last


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_collective_that_does_not_complete_is_told_with_the_rank_that_hangs(tmp_path, rank):
    # expires
    more = ["--model.rank", str(rank), "--trainer.strategy_options", "{timeout_seconds: 5}"]
    done = run(command("Hangs", "ddp", *more), cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    problem = f"rank {rank} hangs: rank {1 - rank} timed out (no batch ended in time"
    advice = "the strategy's timeout_seconds sets how long); see docs/trouble.md#a-rank-hangs"
    assert done.stderr.splitlines()[-1] == f"{problem}; {advice}"
    calls = re.findall(r"^rank (\d) .*at:\n(?:  File .*\n)*  File .* in (\w+)$", done.stderr, re.M)
    assert sorted(calls) == sorted([(str(rank), "wait_for_ever"), (str(1 - rank), "all_reduce")])
    assert "Traceback" not in done.stderr
    assert_nothing_left(tmp_path)


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
    group = collectives.dist
    monkeypatch.setattr(group, "is_initialized", lambda: True)
    monkeypatch.setattr(group, "get_world_size", lambda _: size)
    monkeypatch.setattr(group, "get_backend_config", lambda: backends)
    assert collectives.teardown_may_hang() is waits


def test_a_failure_that_was_caught_is_not_shown_later(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_FAILURE_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINER_PARENT_PID", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TRAINER_RANK_PID", "1")
    monkeypatch.setattr(failures.signals, "hide_traceback", lambda is_hidden: None)
    failures.report_failure(ArithmeticError("caught"))
    [failure] = failures.failures(tmp_path)
    assert failure.message.endswith("rank 1: ArithmeticError: caught")
    reports.report_start()
    assert failures.failures(tmp_path) == []
