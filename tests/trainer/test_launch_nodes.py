"""Our launcher on several nodes: the command is started once on each, here twice on one machine."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.project import fit, free_port, run

from processes import at_root
from test_launch import SHORT, SUBJECT, losses


def on_two_nodes(folder: Path, *arguments: str, **more: str) -> "list[CompletedProcess[str]]":
    """A short fit with a run of the same name, started as on two nodes."""
    into = ["--trainer.default_root_dir", str(folder), "--trainer.run_name", "run"]
    command = fit(*SHORT, "--trainer.accelerator", "cpu", *into, *arguments)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}

    def start(node: int) -> "CompletedProcess[str]":
        return run(command, cwd=folder, extra=at_root() | master | {"NODE_RANK": str(node)})

    with ThreadPoolExecutor(2) as executor:
        return list(executor.map(start, range(2)))


EVERY = ["--model.dropout", "0", "--trainer.log_every_n_steps", "1"]


# Older Lightning started its ranks with these, which have no RANK and no number of nodes.
OLDER = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("devices", "more"),
    [
        (1, {"NNODES": "2"}),
        (1, OLDER),
        pytest.param(2, {"NNODES": "2"}, marks=pytest.mark.slow),
    ],
)
def test_two_nodes_train_as_one_does(tmp_path: Path, devices: int, more: dict[str, str]) -> None:
    size = ["--trainer.max_steps", "3", "--trainer.global_batch_size", "64"]
    nodes = on_two_nodes(tmp_path, *EVERY, *size, "--trainer.devices", str(devices), **more)
    for node in nodes:
        assert node.returncode == 0, node.stderr
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    layout = attempt["layout"]
    assert (layout["world_size"], layout["local_world_size"]) == (2 * devices, devices)
    assert (layout["num_nodes"], layout["main_address"]) == (2, "127.0.0.1")
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == [
        f"rank-{rank}.log" for rank in range(1, 2 * devices)
    ]
    assert "effective batch size 64" in nodes[0].stdout
    alone = ["--trainer.run_name", "alone", "--trainer.default_root_dir", tmp_path]
    done = run(fit(*SHORT, *EVERY, *size, *alone, "--trainer.accelerator", "cpu"))
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 3
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


def test_a_rank_of_the_second_node_that_fails_ends_both(tmp_path: Path) -> None:
    more = ["--trainer.devices", "1", "--model", f"{SUBJECT}.RaisesOnOneRank"]
    first, second = on_two_nodes(tmp_path, *more, NUM_NODES="2")
    assert second.returncode == 1
    assert "ArithmeticError: planted on rank 1" in second.stderr
    assert first.returncode != 0


def test_mistakes_are_told_before_anything_starts(tmp_path: Path) -> None:
    more = ["--trainer.devices", "2", "--trainer.num_nodes", "3", "--trainer.strategy", "ddp_spawn"]
    for node in on_two_nodes(tmp_path, *more, NUM_NODES="2", WORLD_SIZE="3"):
        assert node.returncode == 2
        assert node.stderr.splitlines() == [
            "error: num_nodes=3, but NUM_NODES or NNODES is 2",
            "error: WORLD_SIZE=3, but 2 nodes of 2 processes are 4; unset it, or change devices",
            "error: strategy='ddp_spawn' runs on 1 node and there are 2; use strategy='ddp'",
        ]
    assert list(tmp_path.iterdir()) == []
