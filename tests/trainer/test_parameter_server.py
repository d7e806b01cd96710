"""A parameter server: what it refuses, whose gradients make a step, and lost workers."""

import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from my_project_trainer import ConfigurationError, Trainer
from my_project_trainer.strategies.asynchronous.links import WORKER, Link, LinkError, Peers
from my_project_trainer.strategies.asynchronous.server import Server
from tests.conformance.subject import make
from tests.project import run
from torch import nn

from parameter_server_subject import BATCH, SAMPLES

STEPS = -(-SAMPLES // BATCH)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"strategy_options": {"max_staleness": -1}}, "max_staleness=-1: give at least 0"),
        ({"precision": "16-mixed"}, "a gradient scaler must see the gradients of all workers"),
        ({"sync_batchnorm": True}, "no process group over which to synchronize"),
        ({"async_checkpoints": True}, "async_checkpoints: .* leave it out"),
        ({"learning_rate_scaling": "linear"}, "set max_staleness=0, or scale the rate in conf"),
        ({"num_nodes": 2}, "runs on 1 node and there are 2"),
        ({"strategy_options": {"servers": 2}}, "no option 'servers': there is one, on rank 0"),
    ],
)
def test_refuses_before_any_process_starts(
    nothing_runs: None, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Trainer(strategy="parameter_server", accelerator="cpu", devices=2, max_epochs=1, **given)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("adversarial", "manual optimization: optimizers step on the server"),
        ("words", "words.weight has sparse gradients .* workers send whole gradients"),
    ],
)
def test_refuses_a_module(nothing_runs: None, kind: str, reason: str) -> None:
    trainer = Trainer(strategy="parameter_server", accelerator="cpu", devices=2, max_epochs=1)
    with pytest.raises(ConfigurationError, match=reason):
        trainer.check_fit(make(kind))


# --- whose gradients make a step ------------------------------------------------------------------


class Workers:
    """Threads that each send gradients of 1 to a server of one parameter, which SGD steps."""

    def __init__(self, count: int, bound: int | None, timeout: float = 20.0) -> None:
        store = dist.HashStore()
        self.server = Server(store, count, bound, timeout)
        self.held = nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([self.held], lr=1.0)
        self.server.hold([self.held], [self.optimizer])
        self.links = [Link(store, rank, WORKER, timeout) for rank in range(count)]
        self.peers = [Peers(rank, count, self.links[rank]) for rank in range(count)]

    def begin(self, rank: int) -> nn.Parameter:
        """Have a worker fetch weights to compute on."""
        parameter = nn.Parameter(torch.zeros(3))
        self.peers[rank].pull([parameter], to_train=True)
        return parameter

    def step(self, rank: int, gradient: float = 1.0, seconds: float = 0.0) -> torch.Tensor:
        """A step of a worker; return the weights on which it computed."""
        parameter = self.begin(rank)
        time.sleep(seconds)
        parameter.grad = torch.full((3,), gradient)
        self.peers[rank].step([parameter], (-1.0, torch.inf))
        return parameter.detach()

    def lose(self, rank: int) -> None:
        """Close a worker's connection."""
        del self.peers[rank]._link, self.links[rank]

    def run(self, steps: int, most_seconds: Sequence[float]) -> None:
        """Each worker makes steps that take random times."""

        def work(rank: int) -> None:
            chance = random.Random(rank)
            for _ in range(steps):
                self.step(rank, seconds=chance.uniform(0, most_seconds[rank]))
            self.peers[rank].leave()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.peers))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()


@pytest.mark.parametrize("bound", [0, 1, 2, 5, None])
def test_staleness_is_bounded_and_each_gradient_counts(bound: int | None) -> None:
    workers = Workers(3, bound)
    workers.run(20, [0.001, 0.002, 0.02])
    values = workers.server.staleness()
    assert values.keys() == {"staleness", *(f"staleness_max/rank-{rank}" for rank in range(3))}
    largest = max(values.values())
    made = -float(workers.held[0].detach())
    if bound == 0:
        assert largest == 0
        assert made == pytest.approx(20)  # averages of all
    elif bound is None:
        assert largest > 5  # the slow one's, for whom nobody waits
        assert made == 60
    else:
        assert 0 < largest <= bound
        assert 20 < made <= 60  # gradients at the bound are averaged into one step
    assert workers.server._version == pytest.approx(made)
    workers.server.close()


def test_without_a_loss_each_gradient_is_computed_on_the_newest_weights() -> None:
    workers = Workers(2, 4)
    found = [float(workers.step(rank)[0]) for rank in (0, 1, 1, 0)]
    assert found == [0.0, -1.0, -2.0, -3.0]
    for each in workers.peers:
        each.leave()
    workers.server.close()


def test_a_lost_worker_is_left_out_of_a_step_that_waits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    workers = Workers(3, 0)
    threads = [
        threading.Thread(target=workers.step, args=(rank, gradient))
        for rank, gradient in ((0, 2.0), (1, 4.0))
    ]
    for each in threads:
        each.start()
    workers.begin(2)
    workers.lose(2)
    for each in threads:
        each.join()
    assert float(workers.held[0].detach()) == -3.0
    workers.peers[1].leave()
    own = torch.tensor([7], dtype=torch.uint8)
    assert {n: int(each) for n, each in workers.peers[0].exchange(own).items()} == {0: 7}
    workers.peers[0].leave()
    workers.server.close()
    assert "note: rank 2 was lost in its step 1; the other 2 workers continue" in (
        capfd.readouterr().err
    )


def test_an_error_of_an_optimizer_ends_all_workers() -> None:
    workers = Workers(2, 0)
    workers.peers[0].server_failure = workers.server.failed

    def fail(*args: Any) -> None:
        raise ValueError("bad rate")

    workers.optimizer.register_step_pre_hook(fail)
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            workers.step(rank)
        except (ValueError, LinkError) as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert isinstance(errors[0], ValueError)
    assert str(errors[1]) == "the parameter server of rank 0 failed"
    workers.server.close()


def test_a_silent_worker_is_left_out_after_the_timeout() -> None:
    workers = Workers(2, 0, timeout=1.0)
    workers.begin(1)
    assert float(workers.step(0)[0]) == 0.0
    assert float(workers.held[0].detach()) == -1.0
    with pytest.raises(LinkError, match="the parameter server of rank 0 failed"):
        workers.peers[1].exchange(torch.tensor([], dtype=torch.uint8))
    workers.peers[0].leave()
    workers.server.close()


# --- whole runs -----------------------------------------------------------------------------------


def train(
    folder: Path, options: dict[str, Any], subject: dict[str, Any]
) -> "tuple[int, str, dict[str, list[float]]]":
    """Exit code, what was printed as errors, and logged values by name."""
    words = ["-m", "parameter_server_subject", folder, json.dumps(options), json.dumps(subject)]
    done = run(words)
    log = folder / "run" / "metrics.csv"
    rows = [line.split(",") for line in log.read_text().splitlines()[1:]] if log.exists() else []
    values: dict[str, list[float]] = {}
    for _, _, name, value in rows:
        values.setdefault(name, []).append(float(value))
    return done.returncode, done.stderr, values


def test_a_killed_worker_leaves_the_others_training(tmp_path: Path) -> None:
    options = {"devices": 4, "max_epochs": 3, "strategy_options": {"max_staleness": 6}}
    subject = {"seconds": {"1": 0.03}, "ends": {"2": [STEPS + 2, "SIGKILL"]}}
    code, error, values = train(tmp_path, options, subject)
    assert code == 0, error
    (line,) = error.splitlines()
    assert line == f"note: rank 2 was lost in its step {STEPS + 3}; the other 3 workers continue"
    assert len(values["loss"]) == 3 * STEPS
    assert values["samples"] == [SAMPLES] * 3  # the others read the lost rank's, too
    assert 2 <= max(values["staleness_max/rank-1"]) <= 6
    assert max(max(values[f"staleness_max/rank-{rank}"]) for rank in range(4)) <= 6
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
