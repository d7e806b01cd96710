"""A parameter server: what it refuses, who may talk to it, whose gradients make a step, losses."""

import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import ConfigurationError, Trainer
from my_project_trainer.strategies.asynchronous.peers import Peers, ServerLostError
from my_project_trainer.strategies.asynchronous.server import Server
from my_project_trainer.strategies.asynchronous.wire import (
    Connection,
    Kind,
    Packing,
    WrongSecretError,
)
from tests.conformance.subject import make
from tests.project import run
from torch import nn

from parameter_server_subject import BATCH, SAMPLES

SECRET = bytes(range(32))
STEPS = -(-SAMPLES // BATCH)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"strategy_options": {"servers": 0}}, "servers=0: give at least 1"),
        ({"strategy_options": {"max_staleness": -1}}, "max_staleness=-1: give at least 0"),
        ({"precision": "16-mixed"}, "a gradient scaler must see the gradients of all workers"),
        ({"sync_batchnorm": True}, "no process group over which to synchronize"),
        ({"async_checkpoints": True}, "async_checkpoints: .* leave it out"),
        ({"learning_rate_scaling": "linear"}, "set max_staleness=0, or scale the rate in conf"),
        ({"num_nodes": 2}, "runs on 1 node and there are 2"),
        ({"strategy_options": {"servers": 3}}, "servers=3: each rank runs at most one server"),
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
        ("adversarial", "manual optimization: optimizers step on the servers"),
        ("words", "words.weight has sparse gradients .* workers send whole gradients"),
    ],
)
def test_refuses_a_module(nothing_runs: None, kind: str, reason: str) -> None:
    trainer = Trainer(strategy="parameter_server", accelerator="cpu", devices=2, max_epochs=1)
    with pytest.raises(ConfigurationError, match=reason):
        trainer.check_fit(make(kind))


# --- who may talk to it ---------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(0, 1, SECRET, 0, 20.0)
    yield made
    made.close()


def connected(server: Server) -> Connection:
    return Connection(socket.create_connection(("127.0.0.1", server.port), 20))


def test_it_listens_on_loopback_only(server: Server) -> None:
    assert server._listener.getsockname()[0] == "127.0.0.1"


def test_a_wrong_secret_is_refused_and_a_right_one_still_accepted(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConnectionError):
        connected(server).join(b"another", 0, 20.0)
    peers = Peers(0, 1, [server.port], SECRET, 20.0)
    assert peers.exchange(b"mine") == {0: b"mine"}
    peers.leave()
    assert capfd.readouterr().err.count("refused a connection that does not know") == 1


def test_a_message_before_the_secret_is_neither_answered_nor_held_in_memory(
    server: Server,
) -> None:
    for length in (0, 10**12):
        stranger = connected(server)
        assert stranger.receive()[0] is Kind.HELLO
        stranger._socket.sendall(Kind.EXCHANGE.to_bytes() + length.to_bytes(8))
        with pytest.raises(ConnectionError):
            stranger.receive()


def test_a_rank_joins_once(server: Server) -> None:
    peers = Peers(0, 1, [server.port], SECRET, 20.0)
    other = connected(server)
    other.join(SECRET, 0, 20.0)
    with pytest.raises(ConnectionError):
        other.receive()
    peers.leave()


def test_a_worker_does_not_talk_to_a_server_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection = Connection(listener.accept()[0])
            connection.send(Kind.HELLO, bytes(32))
            connection.receive()
            connection.send(Kind.HELLO, bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        connection = Connection(socket.create_connection(listener.getsockname(), 20))
        with pytest.raises(WrongSecretError):
            connection.join(SECRET, 0, 20.0)
        thread.join()


# --- whose gradients make a step ------------------------------------------------------------------


class Workers:
    """Threads that each send gradients of 1 to a server of one parameter, which SGD steps."""

    def __init__(self, count: int, bound: int | None, timeout: float = 20.0) -> None:
        self.server = Server(0, count, SECRET, bound, timeout)
        original = torch.zeros(3)
        packing = Packing([original])
        weights = packing.empty()
        self.held = nn.Parameter(packing.views(weights)[0])
        self.server.serve([self.held], weights, [torch.optim.SGD([self.held], lr=1.0)])
        self.peers = [
            Peers(rank, count, [self.server.port], SECRET, timeout) for rank in range(count)
        ]

    def begin(self, rank: int) -> nn.Parameter:
        """Have a worker fetch weights to compute on."""
        parameter = nn.Parameter(torch.zeros(3))
        self.peers[rank].share([[parameter]])
        self.peers[rank].pull(to_train=True)
        return parameter

    def step(self, rank: int, gradient: float = 1.0, seconds: float = 0.0) -> torch.Tensor:
        """A step of a worker; return the weights on which it computed."""
        parameter, peers = self.begin(rank), self.peers[rank]
        time.sleep(seconds)
        parameter.grad = torch.full((3,), gradient)
        peers.send_gradients()
        peers.step(1.0, float("inf"))
        return parameter.detach()

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
    values = workers.server.steps.staleness.take()
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
    assert workers.server.steps.version == pytest.approx(made)
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
    workers.peers[2]._connections[0].close()
    for each in threads:
        each.join()
    assert float(workers.held[0].detach()) == -3.0
    workers.peers[0].leave()
    assert workers.peers[1].exchange(b"left") == {1: b"left"}
    workers.peers[1].leave()
    workers.server.close()
    assert "note: rank 2 was lost in its step 1; the other 2 workers continue" in (
        capfd.readouterr().err
    )


def test_workers_that_have_not_joined_yet_are_counted_when_one_is_lost(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = Server(0, 3, SECRET, 0, 20.0)
    peers = Peers(2, 3, [server.port], SECRET, 20.0)
    peers._connections[0].close()
    end, told = time.monotonic() + 60, ""
    while not told and time.monotonic() < end:
        time.sleep(0.01)
        told = capfd.readouterr().err
    server.close()
    assert told == "note: rank 2 was lost in its step 0; the other 2 workers continue\n"


def test_an_error_of_an_optimizer_ends_all_workers() -> None:
    workers = Workers(2, 0)

    def fail(*args: Any) -> None:
        raise ValueError("bad rate")

    workers.server.steps._optimizers[0].register_step_pre_hook(fail)
    errors = []

    def work(rank: int) -> None:
        with pytest.raises(ServerLostError, match="the parameter server of rank 0 failed") as error:
            workers.step(rank)
        errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(errors) == 2
    assert isinstance(workers.server.failure, ValueError)
    workers.server.close()


def test_a_silent_worker_is_left_out_after_the_timeout() -> None:
    workers = Workers(2, 0, timeout=1.0)
    workers.begin(1)
    assert float(workers.step(0)[0]) == 0.0
    assert float(workers.held[0].detach()) == -1.0
    with pytest.raises(ServerLostError, match="has closed the connection"):
        workers.peers[1].exchange(b"")
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
