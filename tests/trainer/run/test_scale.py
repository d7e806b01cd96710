"""What a start costs the store of rank 0, counted: no more than in proportion to the ranks."""

import collections
import datetime
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import long_runs
import pytest
import torch
import torch.distributed as dist
from my_project_trainer.launch import rendezvous
from my_project_trainer.launch.cluster import Layout
from tests.project import PACKAGE, run

LONG = datetime.timedelta(seconds=600)
LAZY = "TORCH_GLOO_LAZY_INIT"


class Counting(dist.Store):
    """The store of one rank of several threads, which counts what the rank asks of it."""

    def __init__(self, shared: dist.Store) -> None:
        super().__init__()
        self.shared = shared
        self.counted: collections.Counter[tuple[str, str]] = collections.Counter()

    def _do(self, kind: str, key: str, *more: Any) -> Any:
        self.counted[kind, key] += 1
        return getattr(self.shared, kind)(key, *more)

    def set(self, key: str, value: Any) -> None:
        self._do("set", key, value)

    def get(self, key: str) -> Any:
        return self._do("get", key)

    def add(self, key: str, value: int) -> Any:
        return self._do("add", key, value)

    def check(self, keys: list[str]) -> Any:
        self.counted["check", keys[0]] += 1
        return self.shared.check(keys)

    def wait(self, keys: list[str], timeout: Any = LONG) -> None:
        self.counted["wait", keys[0]] += 1
        self.shared.wait(keys, timeout)

    def of(self, *kinds: str) -> int:
        return sum(number for (kind, _), number in self.counted.items() if kind in kinds)


def layout(rank: int, ranks: int) -> Layout:
    return Layout(rank=rank, local_rank=rank, world_size=ranks, local_world_size=ranks)


def joined(shared: dist.Store, ranks: int) -> list[Counting]:
    """The stores of threads that have joined, one after the other."""
    stores = [Counting(shared) for _ in range(ranks)]
    turns = [threading.Event() for _ in range(ranks)]

    def join(rank: int) -> None:
        turns[rank].wait(600)
        if rank > 0:
            turns[rank - 1].set()
        rendezvous._join(stores[rank], layout(rank, ranks), LONG)

    with ThreadPoolExecutor(ranks) as executor:
        done = [executor.submit(join, rank) for rank in range(ranks)]
        turns[0].set()
        turns[-1].set()
        for future in done:
            future.result(600)
    return stores


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_rank_0_looks_at_each_rank_that_joins_once(ranks: int) -> None:
    first, *others = joined(dist.HashStore(), ranks)
    looks = first.counted["get", "asked"]  # it looks at two counters, however many ranks there are
    gets = [number for (kind, _), number in first.counted.items() if kind == "get"]
    assert sum(gets) == ranks + 2 * looks
    assert (first.of("set"), first.of("add")) == (ranks + 1, 2)
    # A rank is counted before its token is there, so a look may come between.
    assert ranks <= first.of("check") <= ranks + looks
    for other in others:
        assert (other.of("set"), other.of("add"), other.of("get")) == (2, 2, 1)


def test_ranks_of_an_earlier_start_are_not_taken_for_those_of_this_one() -> None:
    shared = dist.HashStore()
    joined(shared, 4)
    # As one that was killed between two operations: it was counted, and has no token.
    shared.add("asked", 1)
    joined(shared, 4)
    soon = datetime.timedelta(seconds=0.3)
    with pytest.raises(rendezvous.UserError, match=r"rank 1, 2, 3 did not join within 0\.3 s"):
        rendezvous._join(shared, layout(0, 4), soon)
    with pytest.raises(rendezvous.UserError, match=r"rank 0 did not join within 0\.3 s"):
        rendezvous._join(shared, layout(2, 4), soon)


def connections(ranks: int) -> list[Counting]:
    """The stores of threads that have formed a group and reduced a number."""
    shared = dist.HashStore()
    stores = [Counting(shared) for _ in range(ranks)]

    # Both collectives of every step and those of a checkpoint: a ring, and a tree of rank 0.
    def form(rank: int) -> None:
        group = dist.ProcessGroupGloo(stores[rank], rank, ranks, LONG)
        number = torch.ones(1)
        group.allreduce([number]).wait()
        assert number.item() == ranks
        group.broadcast(number, 0).wait()
        group.barrier().wait()

    with ThreadPoolExecutor(ranks) as executor:
        list(executor.map(form, range(ranks)))
    return stores


@pytest.mark.parametrize(("ranks", "is_lazy"), [(2, False), (16, False), (17, True), (34, True)])
def test_many_ranks_connect_to_few(monkeypatch, ranks, is_lazy):
    rendezvous.stay_on_loopback()
    monkeypatch.setenv(LAZY, "")  # restored at the end
    monkeypatch.delenv(LAZY)
    monkeypatch.setattr(rendezvous, "_stores", {layout(0, ranks): dist.HashStore()})
    rendezvous.connect_store(layout(0, ranks), LONG)
    assert os.environ.get(LAZY) == ("1" if is_lazy else None)
    reads = [connection.of("get") for connection in connections(ranks)]
    if is_lazy:
        # Its neighbors in the ring, and those in the trees: a logarithm of the number of ranks.
        assert max(reads) <= 2 * (2 + 2 * ranks.bit_length())
        assert max(reads) < ranks
    else:
        assert min(reads) >= ranks - 1


SERVES = f"""
import datetime, resource
from {PACKAGE}_trainer.launch import cluster, rendezvous
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for most in (hard, 5000):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    layout = cluster.Layout(world_size=2048, num_nodes=256, main_port=0, launch_id="x")
    store = rendezvous._tcp_store(layout, datetime.timedelta(seconds=600))
    wanted = min(most, 65536) if most > 0 else 65536
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == wanted)
"""


def test_the_rank_that_serves_the_store_may_have_a_connection_of_each(tmp_path: Any) -> None:
    done = run(["-c", SERVES], cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")


def test_a_long_run_that_grows_is_no_success() -> None:
    flat = {"resident": 300.0, "anonymous": 200.0, "descriptors": 12.0, "threads": 5.0}
    flat |= {"yardstick_ms": 10.0}
    steps = [{"step": 50.0 * n, "cpu_s": 0.1 * n, **flat} for n in range(1, 201)]
    assert long_runs.problems(long_runs.tenths(steps, 10_000)) == []
    grown = [{**step, "resident": 300 + step["step"] / 100} for step in steps]
    leaking = [{**step, "descriptors": 12 + step["step"] // 1000} for step in steps]
    slower = [{**step, "cpu_s": step["step"] ** 2} for step in steps]
    for readings, line in (
        (grown, "resident: 315.2 MiB, then 395.2 (at most 8 more)"),
        (leaking, "descriptors: 13, then 21"),
        (slower, "a step: "),
    ):
        [problem] = long_runs.problems(long_runs.tenths(readings, 10_000))
        assert problem.startswith(line), problem
