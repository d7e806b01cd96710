"""torchrun starts a run again whose rank was killed; it goes on, and gives up where that fails."""

import os
import random
import re
import signal
import time
from itertools import groupby
from pathlib import Path

import psutil
import pytest
from my_project_trainer import errors
from my_project_trainer.launch import cluster, rank
from tests.project import PATIENCE, fit, run, succeed

from preemption_subject import steps_of
from processes import assert_nothing_left, at_root, running, told_in, wait_for

slow = pytest.mark.slow
EVERY = 5
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def torchrun(restarts: int) -> list[str]:
    """The command of two ranks that are started again so often."""
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    return ["-m", "torch.distributed.run", *options]


def slow_fit(folder: Path, *more: str) -> list[str | Path]:
    """A fit of some seconds that saves every so many steps; nothing tells it to go on."""
    return fit(
        *("--model", "preemption_subject.Slow"),
        *("--trainer.global_batch_size", "64", "--trainer.max_epochs", "6"),
        *("--trainer.checkpoint_every_n_steps", str(EVERY), "--trainer.log_every_n_steps", "1"),
        *("--trainer.loggers", "[csv]", "--trainer.default_root_dir", folder),
        *("--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"),
        *more,
    )


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of a run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = [*torchrun(0), *slow_fit(folder, "--trainer.run_name", "whole")]
    succeed(arguments, cwd=folder, extra=at_root())
    return (folder / "whole" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "attempt",
    [
        pytest.param(0, marks=slow),
        *(pytest.param(number, marks=[slow, pytest.mark.exhaustive]) for number in (1, 2, 3)),
    ],
)
def test_a_killed_rank_costs_at_most_the_steps_since_the_last_checkpoint(tmp_path, wanted, attempt):
    store = {UNSHARED: "1"} if attempt % 2 else {}
    overwrite = "false" if attempt % 2 else "true"  # which is of the first attempt only
    arguments = [*torchrun(2), *slow_fit(tmp_path, "--trainer.overwrite", overwrite)]
    with running(arguments, tmp_path, extra=store, fresh=True) as process:
        wait_for(lambda: len(steps_of(tmp_path)) > 2 * EVERY, process)
        time.sleep(random.uniform(0, 0.5))
        psutil.Process(process.pid).children()[attempt // 2 % 2].kill()
        killed = time.time()
        _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    first, *others = (list(made) for _, made in groupby(steps_of(tmp_path), lambda each: each[1]))
    assert len(others) == 1
    print(f"next step {others[0][0].time - killed:.1f} s after the fault")
    assert 0 <= first[-1].step + 1 - others[0][0].step <= EVERY
    [log] = tmp_path.glob("torchrun-*/metrics.csv")
    assert log.read_text() == wanted
    assert_nothing_left(tmp_path)


@slow
def test_ranks_of_a_killed_agent_end(tmp_path):
    long = ["--trainer.run_name", "run", "--trainer.max_epochs", "10000"]
    arguments = [*torchrun(0), *slow_fit(tmp_path, *long)]
    alive = []
    try:
        with running(arguments, tmp_path, fresh=True) as process:
            wait_for(lambda: len(steps_of(tmp_path)) > 1, process)
            ranks = psutil.Process(process.pid).children()
            process.kill()
            gone, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
    finally:
        for child in alive:
            child.kill()
    assert (len(gone), alive) == (2, [])


@slow
def test_three_failures_without_progress_end_the_job(tmp_path):
    model = ["--model", "fault_subject.Fails", "--model.fault", "is_killed"]
    arguments = [*torchrun(100), *slow_fit(tmp_path, *model)]
    done = run(arguments, cwd=tmp_path, extra=told_in(tmp_path))
    assert done.returncode != 0
    line = "3 failures without progress after step 0: see their errors"
    assert (tmp_path / "outcome").read_text() == f"failed {line}\n"
    assert f"error: {line}" in done.stderr
    [folder] = tmp_path.glob("torchrun-*")
    assert not (folder / "restarts.json").exists()
    assert_nothing_left(tmp_path)


ALONE = cluster.Layout(source="torchelastic")


def test_progress_resets_the_count(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(rank, "_SECONDS_TO_BE_ENDED", 0.0)
    monkeypatch.setattr(rank.os, "kill", lambda *arguments: ended.append(arguments))
    for step in (0, 0, 0, 5, 5, 5):
        rank.count_attempt(tmp_path, step, ALONE)
    assert ended == []
    with pytest.raises(errors.UserError, match="3 failures without progress after step 5"):
        rank.count_attempt(tmp_path, 5, ALONE)
    assert ended == [(os.getppid(), signal.SIGTERM)]
    rank.count_attempt(tmp_path, 5, ALONE)


def test_a_damaged_count_is_reset(tmp_path):
    for text in ("", "{", "[]", '{"step": 1}'):
        (tmp_path / "restarts.json").write_text(text)
        rank.count_attempt(tmp_path, 1, ALONE)
        assert re.search('"failures": 0', (tmp_path / "restarts.json").read_text())


@pytest.mark.parametrize(
    ("source", "most", "expected"),
    [("torchelastic", "3", True), ("torchelastic", "0", False), ("srun", "3", False)],
)
def test_only_torchrun_starts_ranks_again(source, most, expected):
    layout = cluster.Layout(source=source)
    assert rank.restarts_expected(layout, {"TORCHELASTIC_MAX_RESTARTS": most}) is expected
    assert not rank.restarts_expected(layout, {})


def test_a_run_bears_the_name_that_torchrun_gives_it():
    assert rank.elastic_run_name({"TORCHELASTIC_RUN_ID": "none"}) is None
    assert rank.elastic_run_name({"TORCHELASTIC_RUN_ID": "b-1"}) == "torchrun-b-1"
