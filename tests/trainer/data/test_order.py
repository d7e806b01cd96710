"""Ranks start what they exchange in the same order, as NCCL needs and gloo does not."""

from functools import cache
from pathlib import Path

import pytest
from my_project_trainer import strategies
from tests.conformance.matrix import MATRIX
from tests.project import run_nodes

from collectives_order import Operation, Ranks, read, stuck
from order_subject import LAUNCHES, PLANTED

NODES = {"nodes": 2}
ENGINES = ("fairscale", "deepspeed")
# They exchange nothing between processes; or in an order of their own, without NCCL.
LEFT_OUT = {
    "single_device": "one process",
    "dp": "one process",
    "horovod": "its coordinator orders the operations of all ranks",
    "parameter_server": "workers talk to a server over gloo, each when it is ready",
    "xla": "the order is that of the compiled graph",
}


def marks(launch: str) -> list[pytest.MarkDecorator]:
    needs = [pytest.mark.needs(launch)] if launch in ENGINES else []
    return needs if launch == "two" else [*needs, pytest.mark.slow]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory):
    """Trains the cases of a launch once, and gives what the ranks of one recorded."""

    @cache
    def trained(launch: str) -> tuple[Path, str]:
        path = tmp_path_factory.mktemp("order-")
        how = {"engine": launch} if launch in ENGINES else {}
        done = run_nodes(["-m", "order_subject", path, launch], NODES.get(launch, 1), **how)
        return path, "".join(process.stderr for process in done if process.returncode)

    def ranks(launch: str, name: str) -> Ranks:
        path, error = trained(launch)
        ranks_read = read(path / name)
        assert len(ranks_read) == NODES.get(launch, LAUNCHES[launch][0]), error[-3000:]
        return ranks_read

    return ranks


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("launch", "name"),
    [
        pytest.param(launch, name, marks=marks(launch))
        for launch, (_, cases) in LAUNCHES.items()
        for name in cases
        if name not in PLANTED
    ],
)
def test_ranks_exchange_in_one_order(records, launch: str, name: str) -> None:
    ranks = records(launch, name)
    assert all(len(operations) > 20 for operations in ranks.values())
    assert stuck(ranks) == []
    # Another thread runs beside the step: what it sends must not go through NCCL.
    beside = [op for operations in ranks.values() for op in operations if op.thread]
    assert [str(operation) for operation in beside if not operation.is_host] == []
    assert {operation.thread.partition("_")[0] for operation in beside} == {"checkpoint"}


def test_a_planted_strategy_that_gloo_forgives_is_found(records) -> None:
    lines = stuck(records("two", "reordered"))
    assert len(lines) == 2
    assert all("all" in line and "(order_subject.py:" in line for line in lines)


def test_every_strategy_that_exchanges_is_recorded() -> None:
    recorded = {name.partition(",")[0] for _, cases in LAUNCHES.values() for name in cases}
    aliases = {row.strategy or name for name, row in MATRIX.items() if row.is_alias}
    assert set(strategies.names()) == recorded - PLANTED.keys() | aliases | LEFT_OUT.keys()


WORLD = (0, 1)


def reduced(name: str = "w", size: int = 4, group: tuple[int, ...] = WORLD) -> Operation:
    """An operation of all ranks of a group."""
    return Operation("allreduce_", group, name, (size,))


def sent(kind: str, peer: int, size: int = 4, batch: int | None = None) -> Operation:
    return Operation(kind, WORLD, "w", (size,), peer, batch)


@pytest.mark.parametrize(
    "ranks",
    [
        {0: [reduced(), reduced("a")], 1: [reduced(), reduced("a")]},
        # Both send, then receive: at once, as NCCL's group calls allow.
        {
            0: [sent("send", 1, batch=1), sent("recv_", 1, batch=1)],
            1: [sent("send", 0, batch=7), sent("recv_", 0, batch=7)],
        },
        {0: [sent("send", 1), sent("recv_", 1)], 1: [sent("recv_", 0), sent("send", 0)]},
        {0: [], 1: []},
    ],
)
def test_what_ends_with_nccl_is_in_order(ranks: Ranks) -> None:
    assert stuck(ranks) == []


@pytest.mark.parametrize(
    "ranks",
    [
        {0: [reduced(), reduced("a")], 1: [reduced("a"), reduced()]},
        {0: [reduced(size=4)], 1: [reduced(size=8)]},
        {0: [reduced()], 1: []},
        {0: [reduced(), sent("send", 1)], 1: [sent("recv_", 0), reduced()]},
        {0: [sent("send", 1), sent("recv_", 1)], 1: [sent("send", 0), sent("recv_", 0)]},
        {0: [sent("send", 1, 4)], 1: [sent("recv_", 0, 8)]},
        # Each two ranks share one operation only, and wait in a circle.
        {
            0: [reduced("a", group=(0, 1)), reduced("c", group=(0, 2))],
            1: [reduced("b", group=(1, 2)), reduced("a", group=(0, 1))],
            2: [reduced("c", group=(0, 2)), reduced("b", group=(1, 2))],
        },
    ],
)
def test_what_nccl_would_wait_in_forever_is_found(ranks: Ranks) -> None:
    lines = stuck(ranks)
    assert lines
    assert all("waits in" in line for line in lines)
