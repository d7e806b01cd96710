"""Our launcher on several nodes: the command is started once on each, here twice on one machine."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from my_project_trainer import Trainer
from my_project_trainer.errors import ConfigurationError
from test_launch import SHORT, SUBJECT
from tests.project import fit, free_port, run, start, succeed

from fitting import logged
from processes import at_root


def commands(folder: Path, *arguments: str, **more: str) -> Iterator[dict[str, Any]]:
    """A short fit with a run of the same name, as it is started on each of two nodes."""
    into = ["--trainer.default_root_dir", str(folder), "--trainer.run_name", "run"]
    command = fit(*SHORT, "--trainer.accelerator", "cpu", *into, *arguments)
    extra = at_root() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    for node in range(2):
        yield {"arguments": command, "cwd": folder, "extra": extra | {"NODE_RANK": str(node)}}


def on_two_nodes(folder: Path, *arguments: str, **more: str) -> "list[CompletedProcess[str]]":
    """What a fit on two nodes has printed on each."""
    with ThreadPoolExecutor(2) as executor:
        nodes = commands(folder, *arguments, **more)
        return list(executor.map(lambda command: run(**command), nodes))


EVERY = [
    *("--model.dropout", "0", "--trainer.log_every_n_steps", "1"),
    *("--trainer.max_steps", "3", "--trainer.global_batch_size", "64"),
]


# Older Lightning started its ranks with these, which have no RANK and no number of nodes.
OLDER = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    where = ["--trainer.run_name", "run", "--trainer.default_root_dir", folder]
    succeed(fit(*SHORT, *EVERY, *where, "--trainer.accelerator", "cpu"))
    return logged(folder / "run")


@pytest.mark.parametrize(
    ("devices", "more"),
    [(1, {"NNODES": "2"}), (1, OLDER), pytest.param(2, {"NNODES": "2"}, marks=pytest.mark.slow)],
)
def test_two_nodes_train_as_one_does(tmp_path, alone, devices, more):
    nodes = on_two_nodes(tmp_path, *EVERY, "--trainer.devices", str(devices), **more)
    for node in nodes:
        assert node.returncode == 0, node.stderr
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    layout = attempt["layout"]
    assert (layout["world_size"], layout["local_world_size"]) == (2 * devices, devices)
    assert (layout["num_nodes"], layout["main_address"]) == (2, "127.0.0.1")
    logs = [f"rank-{rank}.log" for rank in range(1, 2 * devices)]
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == logs
    assert "effective batch size 64" in nodes[0].stdout
    assert len(logged(tmp_path / "run")) == 3
    assert logged(tmp_path / "run") == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_a_rank_of_the_second_node_that_fails_ends_both(tmp_path: Path) -> None:
    more = ["--trainer.devices", "1", "--model", f"{SUBJECT}.RaisesOnOneRank"]
    first, second = on_two_nodes(tmp_path, *more, NUM_NODES="2")
    assert second.returncode == 1
    assert "ArithmeticError: planted on rank 1" in second.stderr
    assert first.returncode != 0


@pytest.mark.slow
def test_a_rank_ends_though_that_with_the_store_is_stopped(tmp_path: Path) -> None:
    model = ["--model", "fault_subject.Fails", "--model.fault", "is_stopped", "--model.rank", "0"]
    # expires
    options = ["--trainer.strategy", "fsdp", "--trainer.strategy_options", "{timeout_seconds: 3}"]
    size = ["--trainer.devices", "1", "--trainer.global_batch_size", "16"]
    first, second = commands(tmp_path, *model, *options, *size, NNODES="2")
    stopped = start(**first)
    try:
        done = run(**second)
    finally:
        stopped.kill()
        stopped.communicate()
    assert done.returncode == 1
    *stack, line = done.stderr.splitlines()
    assert line.startswith("rank 1 lost a peer (Timed out waiting 3000ms for ")
    assert line.endswith("; see docs/trouble.md#a-peer-was-lost")
    assert "Traceback" not in done.stderr
    assert all(frame.startswith("  File ") for frame in stack), done.stderr


@pytest.mark.slow
def test_a_rank_without_a_launcher_ends_itself_in_the_first_batch_of_an_epoch(tmp_path):
    model = ["--model", "fault_subject.Fails", "--model.fault", "loops", "--model.rank", "0"]
    model += ["--model.step", "0", "--model.epoch", "1", "--trainer.max_epochs", "2"]
    # expires
    options = ["--trainer.strategy_options", "{timeout_seconds: 3}", "--trainer.devices", "1"]
    short = ["--trainer.limit_train_batches", "2", "--trainer.global_batch_size", "16"]
    first, second = on_two_nodes(tmp_path, *model, *options, *short, NNODES="2")
    assert first.returncode == 1
    assert "Timeout (0:00:08)!" in first.stderr
    assert " in loops\n" in first.stderr
    assert second.returncode == 1
    assert "rank 1 lost a peer (Timed out waiting 3000ms for " in second.stderr


def test_mistakes_are_told_before_anything_starts(tmp_path: Path) -> None:
    more = ["--trainer.devices", "2", "--trainer.num_nodes", "3", "--trainer.strategy", "ddp_spawn"]
    variables = {"NUM_NODES": "2", "WORLD_SIZE": "3", "TRAINER_WORLD_SIZE": "9"}
    for node in on_two_nodes(tmp_path, *more, **variables):
        assert node.returncode == 2
        assert node.stderr.splitlines() == [
            "error: TRAINER_WORLD_SIZE=9 processes are started, but this one is one of 2, read "
            "from nodes; see docs/trouble.md#processes-and-devices-do-not-match",
            "error: num_nodes=3, but NUM_NODES or NNODES is 2",
            "error: WORLD_SIZE=3, but 2 nodes of 2 processes are 4; unset it, or change devices",
            "error: strategy='ddp_spawn' runs on 1 node and there are 2; use strategy='ddp'",
        ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("planned", "fits"),
    [("1", True), ("1:4", True), ("2:4", False), ("2", False), ("0x1", False), ("4:1", False)],
)
def test_a_job_says_how_many_processes_it_may_have(planned, fits, monkeypatch):
    monkeypatch.setenv("TRAINER_WORLD_SIZE", planned)
    if fits:
        Trainer(accelerator="cpu")
    else:
        with pytest.raises(ConfigurationError, match=f"^TRAINER_WORLD_SIZE={planned} processes"):
            Trainer(accelerator="cpu")
