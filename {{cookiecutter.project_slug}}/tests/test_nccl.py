"""How a run ends whose ranks are over NCCL, as far as that can be simulated on CPUs."""

import pytest

from .project import assert_nothing_left, at_root, fit, run

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
ERROR = "rank 1: ArithmeticError: planted on rank 1"


def command(name: str, strategy: str, *arguments: str) -> list[str]:
    """A fit on two processes, started by us, or by torchrun."""
    shared = fit(
        *("--model", f"tests.nccl_subject.{name}", "--trainer.default_root_dir", "runs"),
        *("--trainer.max_steps", "4", "--trainer.loggers", "[]", "--trainer.accelerator", "cpu"),
        *arguments,
    )
    if strategy == "torchrun":
        return [*TORCHRUN, *map(str, shared)]
    return [*map(str, shared), "--trainer.strategy", strategy, "--trainer.devices", "2"]


@pytest.mark.parametrize(
    "strategy", ["ddp", "torchrun", pytest.param("ddp_spawn", marks=pytest.mark.slow), "ddp_fork"]
)
def test_a_rank_that_raises_ends_the_run_though_its_group_cannot_be_destroyed(tmp_path, strategy):
    done = run(command("OverNCCL", strategy), cwd=tmp_path, extra=at_root())
    assert done.returncode == 1
    assert done.stderr.count("in fail\n") == 1 if strategy != "torchrun" else True
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
