"""A resumed run equals the uninterrupted one to the last bit, wherever it was stopped."""

import json
import os
import random
import signal
import time
from functools import cache
from pathlib import Path

import pytest
from my_project_trainer.checkpoint import reading as checkpoint
from my_project_trainer.checkpoint import run_directory
from safetensors.torch import load_file
from tests.project import ROOT, fit, start, succeed

SLOW = [pytest.mark.slow]
EXHAUSTIVE = [*SLOW, pytest.mark.exhaustive]
LAYOUTS = [
    pytest.param(2, 2),
    pytest.param(1, 0, marks=EXHAUSTIVE),
    pytest.param(2, 0, marks=SLOW),
    *(pytest.param(*layout, marks=EXHAUSTIVE) for layout in ((1, 2), (3, 0), (3, 2))),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    """Runs a layout's worker once: the folder that it wrote, and a line a step."""

    @cache
    def result(processes: int, loader_workers: int) -> tuple[Path, list[dict[str, object]]]:
        folder = tmp_path_factory.mktemp(f"resume-{processes}-{loader_workers}-")
        done = succeed(["-m", "resume_worker", str(processes), str(loader_workers), folder])
        return folder, [json.loads(line) for line in done.stdout.splitlines()]

    return result


@pytest.mark.parametrize(("processes", "loader_workers"), LAYOUTS)
@pytest.mark.slow
def test_every_stop_step_resumes_to_the_last_bit(results, processes, loader_workers):
    _, lines = results(processes, loader_workers)
    steps = 2 * -(-44 // (4 * processes))
    assert lines == [{"step": step, "weights": True, "metrics": True} for step in range(1, steps)]


@pytest.mark.parametrize(
    "processes",
    [pytest.param(2, marks=SLOW), *(pytest.param(count, marks=EXHAUSTIVE) for count in (1, 3))],
)
def test_loader_workers_change_nothing(results, processes):
    one, two = (results(processes, workers)[0] for workers in (0, 2))
    ours, theirs = (load_file(folder / "weights.safetensors") for folder in (one, two))
    assert all(ours[key].equal(theirs[key]) for key in ours)
    assert (one / "metrics.csv").read_text() == (two / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=EXHAUSTIVE), pytest.param(2, marks=SLOW)]
)
def test_a_run_that_is_killed_resumes_to_the_last_bit(tmp_path, processes):
    arguments = fit(
        *("--trainer.devices", str(processes), "--trainer.max_epochs", "3"),
        *("--trainer.checkpoint_every_n_steps", "3", "--trainer.log_every_n_steps", "1"),
        *("--trainer.loggers", "[csv]", "--trainer.default_root_dir", tmp_path),
    )
    succeed([*arguments, "--trainer.run_name", "whole"])
    killed = [*arguments, "--trainer.run_name", "killed", "--trainer.resume", "auto"]
    kill_at_random_step(killed, tmp_path / "killed")
    assert "resumed from" in succeed(killed).stderr
    runs = [tmp_path / name for name in ("whole", "killed")]
    logs = [(run / "metrics.csv").read_text() for run in runs]
    assert logs[0] == logs[1]
    states = [checkpoint.Checkpoint(checkpoint.resolve(run)).state() for run in runs]
    assert all(value.equal(states[1]["model"][key]) for key, value in states[0]["model"].items())


def kill_at_random_step(arguments: list[str | Path], directory: Path) -> None:
    """Start a run and kill it, by SIGKILL, some time after its first checkpoint."""
    process = start(arguments, cwd=ROOT)
    try:
        while not run_directory.complete(directory / "checkpoints"):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("how", [[], pytest.param(["async"], marks=SLOW)], ids=["sync", "async"])
def test_a_kill_while_a_checkpoint_is_written_leaves_a_whole_one(tmp_path, how):
    for attempt in range(8):
        process = start(["-m", "checkpoint_writer", tmp_path, *how])
        try:
            seen = len(run_directory.complete(tmp_path))
            process.stdout.readline()
            time.sleep(random.uniform(0, 0.2))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        newest = checkpoint.resolve(tmp_path)
        state = checkpoint.Checkpoint(newest).state()
        assert seen <= 3, attempt  # two are kept, and a third until the oldest is removed
        assert newest.name == f"step-{state['step']:08d}"
        for tensor in (state["tensor"], *state["optimizers"]):
            assert tensor.unique().tolist() == [float(state["step"])]
