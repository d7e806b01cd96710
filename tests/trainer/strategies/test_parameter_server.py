"""A parameter server: what it refuses, and whose gradients make a step."""

import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import ConfigurationError, Trainer
from my_project_trainer.strategies.asynchronous.server import unpack
from my_project_trainer.strategies.optimizers import Optimization
from tests.conformance.subject import make
from tests.project import run
from torch import nn

from fitting import rows
from parameter_server_subject import BATCH, SAMPLES, Watched

STEPS = -(-SAMPLES // BATCH)
NO_CLIPPING = (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy_options": {"max_staleness": -1}}, "max_staleness=-1: expected int >= 0"),
        ({"learning_rate_scaling": "linear"}, "scale the rate in configure_optimizers"),
        # A warm-up would be that of rank 0's gradients only.
        ({"learning_rate_warmup_steps": 5}, "learning_rate_scaling is 'none'"),
        ({"num_nodes": 2}, "runs on 1 node and there are 2"),
        ({"strategy_options": {"servers": 2}}, "no option 'servers': there is one, on rank 0"),
    ],
)
def test_refuses_before_any_process_starts(nothing_runs, options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        Trainer(strategy="parameter_server", accelerator="cpu", devices=2, max_epochs=1, **options)


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


class Workers:
    """Threads that each send gradients of 1 to a server of one parameter, which SGD steps."""

    def __init__(self, count: int, bound: int | None) -> None:
        self.held = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(()))]
        optimization = Optimization([torch.optim.SGD(self.held, lr=1.0)], [])
        self.server = Watched(optimization, count, bound, 20.0)
        self.server.staleness.clear()
        self.count = count

    def step(self, rank: int, gradient: float = 1.0, seconds: float = 0.0) -> torch.Tensor:
        """A step of a worker; return the weights on which it computed."""
        weights, _ = unpack(self.server.pull(rank), self.held)
        time.sleep(seconds)
        self.server.step(rank, [torch.full((3,), gradient), None], NO_CLIPPING)
        return weights

    def run(self, steps: int, most_seconds: Sequence[float]) -> None:
        """Each worker makes steps that take random times."""

        def work(rank: int) -> None:
            chance = random.Random(rank)
            for _ in range(steps):
                self.step(rank, seconds=chance.uniform(0, most_seconds[rank]))

        self.together([partial(work, rank) for rank in range(self.count)])

    @staticmethod
    def together(calls: Sequence[Callable[[], object]]) -> None:
        with ThreadPoolExecutor(len(calls)) as threads:
            for future in [threads.submit(call) for call in calls]:
                future.result()


@pytest.mark.parametrize("bound", [0, 1, 2, 5, None])
def test_staleness_is_bounded_and_each_gradient_counts(bound: int | None) -> None:
    workers = Workers(3, bound)
    workers.run(20, [0.001, 0.002, 0.02])
    assert len(workers.server.staleness) == 60
    largest = max(workers.server.staleness)
    made = -float(workers.held[0][0].detach())
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


def test_workers_that_wait_for_one_at_the_bound_are_all_served_after_it() -> None:
    workers = Workers(3, 2)
    server, gradients = workers.server, [torch.ones(3), None]
    server.pull(2)
    for _ in range(2):  # then worker 2 is at the bound
        workers.step(0)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(workers.step, rank) for rank in (0, 1)]
        time.sleep(0.2)
        assert not any(future.done() for future in waiting)
        server.step(2, gradients, NO_CLIPPING)
        assert [float(future.result(600)[0]) for future in waiting] == [-2.0, -2.0]
    assert float(workers.held[0][0].detach()) == -5.0  # each gradient is a step
    assert sorted(server.staleness) == [0, 0, 1, 2, 2]


def test_each_gradient_is_computed_on_the_newest_weights() -> None:
    workers = Workers(2, 4)
    assert [float(workers.step(rank)[0]) for rank in (0, 1, 1, 0)] == [0.0, -1.0, -2.0, -3.0]


def test_a_parameter_that_no_worker_used_is_not_stepped() -> None:
    workers = Workers(1, 4)
    workers.server.pull(0)
    workers.server.step(0, [None, torch.ones(())], NO_CLIPPING)
    assert float(workers.held[1].detach()) == 0.0
    workers.step(0)
    assert float(workers.held[1].detach()) == 0.0
    # Nor is anything, with weight decay or momentum, if no parameter was used.
    workers.server.pull(0)
    workers.server.step(0, [None, None], NO_CLIPPING)
    assert float(workers.held[0][0].detach()) == -1.0
    assert workers.server._version == 2


def test_a_worker_that_did_not_use_a_parameter_counts_as_zero() -> None:
    workers = Workers(2, 0)
    server, none = workers.server, NO_CLIPPING
    for rank in (0, 1):
        server.pull(rank)
    workers.together(
        [
            lambda: server.step(0, [torch.full((3,), 4.0), None], none),
            lambda: server.step(1, [None, None], none),
        ]
    )
    assert [float(parameter.sum().detach()) for parameter in workers.held] == [-6.0, 1.0]


def test_all_workers_stop_after_the_same_step() -> None:
    workers = Workers(2, None)
    server, gradients = workers.server, [torch.ones(3), None]
    workers.step(0)
    server.pull(0)  # the fastest has started its second step
    server.pull(1, signal=10)
    assert [server.step(rank, gradients, NO_CLIPPING) for rank in (0, 1)] == [0, 0]
    server.pull(0, signal=12)  # the first one counts
    assert server.step(0, gradients, NO_CLIPPING) == 10
    for signal in (0, 10):  # also after its third step
        server.pull(1)
        assert server.step(1, gradients, NO_CLIPPING) == signal


def train(folder: Path, options: Any, subject: Any) -> tuple[int, str, dict[str, list[float]]]:
    """Exit code, what was printed as errors, and logged values by name."""
    words = ["-m", "parameter_server_subject", folder, json.dumps(options), json.dumps(subject)]
    # In forks, a thread of the server sometimes had torch's SystemError: () method: bad call flags.
    done = run(words, fresh=True)
    values: dict[str, list[float]] = {}
    if (folder / "run" / "metrics.csv").exists():
        for _, _, name, value in rows(folder / "run"):
            values.setdefault(name, []).append(value)
    return done.returncode, done.stderr, values


@pytest.mark.slow
def test_staleness_is_bounded_between_processes(tmp_path: Path) -> None:
    options = {"devices": 4, "max_epochs": 3, "strategy_options": {"max_staleness": 6}}
    options |= {"async_checkpoints": True}
    code, error, values = train(tmp_path, options, {"seconds": {"1": 0.03}})
    assert (code, error) == (0, "")
    assert len(values["loss"]) == 3 * STEPS
    assert values["samples"] == [SAMPLES] * 3
    assert 2 <= max(json.loads((tmp_path / "staleness.json").read_text())) <= 6
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
