"""Effective batch and steps of every strategy, against counting what its ranks really read."""

import itertools
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from my_project_trainer import errors, strategies
from my_project_trainer.data import feed as feeds
from my_project_trainer.data import feed_creation
from my_project_trainer.loop.position import total_steps
from torch.utils.data import DataLoader, TensorDataset

DEVICES, NODES, ACCUMULATE = range(1, 5), range(1, 4), range(1, 4)
# Primes, multiples of most effective batches, and (refused) fewer than a batch.
DATA_SETS, BATCH_SIZES = (1, 3, 37, 48, 72, 97, 144), (1, 4, 6)
GLOBAL_BATCHES = (None, 72)
CASES = list(itertools.product(DATA_SETS, BATCH_SIZES, ACCUMULATE, (False, True), GLOBAL_BATCHES))
STRATEGIES = pytest.mark.parametrize("name", strategies.names())


def readers(name: str, devices: int, nodes: int) -> int:
    """The number of data-parallel replicas, as the requirements say, not the code."""
    alone = ("single_device", "dp", "sequential", "pipeline")
    few = dict.fromkeys((*alone, "tensor_parallel"), 1) | {"ddp2": nodes}
    return few.get(name, devices * nodes)


def layouts(cls: Any) -> list[tuple[int, int]]:
    """Devices of a node, and nodes, as many as a strategy takes."""
    limits = cls.limits
    return [
        (devices, nodes)
        for devices, nodes in itertools.product(DEVICES, NODES)
        if devices <= (limits.max_devices or devices) and nodes <= (limits.max_nodes or nodes)
    ]


class Epoch(NamedTuple):
    """What is announced of an epoch, and the samples that each optimizer step really saw."""

    batch: int
    steps: int
    seen: list[list[int]]


@cache
def read(samples, batch_size, replicas, accumulate, drop_last, global_size) -> Epoch:
    """Have all replicas read an epoch."""
    data = TensorDataset(torch.arange(samples))
    loader = DataLoader(data, batch_size=batch_size, drop_last=drop_last)
    replica_feeds = [
        feed_creation.feed_training(
            loader,
            feeds.Share(replica, replicas, seed=3),
            accumulate=accumulate,
            global_batch_size=global_size,
            in_global_order=True,
        )
        for replica in range(replicas)
    ]
    assert len({(feed.samples_per_step, feed.steps) for feed in replica_feeds}) == 1
    seen: list[list[int]] = [[]]
    for batches in zip(*(feed.epoch(1, 0) for feed in replica_feeds), strict=True):
        assert len({(batch.ends_step, batch.ends_epoch) for batch in batches}) == 1
        for batch in batches:
            # A replica without a sample of its own reads one of the others', which counts nothing.
            seen[-1] += batch.data[0].tolist() if batch.samples else []
        if batches[0].ends_step and not batches[0].ends_epoch:
            seen.append([])
    assert batches[0].ends_step
    assert batches[0].ends_epoch
    return Epoch(replica_feeds[0].samples_per_step, replica_feeds[0].steps, seen)


@STRATEGIES
def test_what_is_announced_is_what_the_replicas_read(name):
    cls = strategies.find(name).cls
    assert layouts(cls)
    for devices, nodes in layouts(cls):
        replicas = strategies.create(name, {}).replicas(devices, nodes)
        assert replicas == readers(name, devices, nodes)
        for case in CASES:
            check_case(replicas, *case)


def check_case(replicas, samples, size, accumulate, drop_last, global_size):
    """Read with so many replicas, and compare; or see it refused."""
    case = (samples, size, replicas, accumulate, drop_last, global_size)
    expected = global_size or size * replicas * accumulate
    if expected % (replicas * accumulate):
        with pytest.raises(errors.ConfigurationError, match="is not divisible by"):
            read(*case)
    elif samples < expected:
        with pytest.raises(errors.ConfigurationError, match=f"more samples than the {samples} of"):
            read(*case)
    else:
        check(read(*case), samples, expected, drop_last)


def check(epoch: Epoch, samples: int, batch: int, drop_last: bool) -> None:
    """Compare what was read of a data set with what should be, and with what was announced."""
    full, rest = divmod(samples, batch)
    sizes = [batch] * full + ([rest] if rest and not drop_last else [])
    assert [len(step) for step in epoch.seen] == sizes
    assert (epoch.batch, epoch.steps) == (batch, len(sizes))
    seen = list(itertools.chain(*epoch.seen))
    assert len(set(seen)) == len(seen) == sum(sizes)
    assert set(seen) <= set(range(samples))


@STRATEGIES
def test_processes_are_enough_for_devices_and_readers(name):
    cls = strategies.find(name).cls
    for devices, nodes in layouts(cls):
        processes = cls.limits.local_processes(devices)
        assert devices % processes == 0
        assert processes * nodes % strategies.create(name, {}).replicas(devices, nodes) == 0


@pytest.mark.parametrize(
    ("steps", "epochs", "most", "total"),
    [
        (5, 3, None, 15),
        (5, 3, 15, 15),
        (5, 3, 14, 14),
        (5, 3, 16, 15),
        (5, None, 7, 7),
        (None, None, 7, 7),
        (None, 3, 7, 7),
        (None, 3, None, None),
        (5, None, None, None),
    ],
)
def test_steps_of_a_whole_run(steps, epochs, most, total):
    assert total_steps(steps, epochs, most) == total
