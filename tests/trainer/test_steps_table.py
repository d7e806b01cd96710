"""Effective batch and steps of every strategy, against counting what its ranks really read."""

import itertools
import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from my_project_trainer import errors, strategies
from my_project_trainer.data import feed as feeds
from my_project_trainer.data import feed_creation
from my_project_trainer.loop.position import total_steps
from tests.project import PACKAGE, run_nodes
from torch.utils.data import DataLoader, TensorDataset

from steps_subject import SAMPLES

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
def read(
    samples: int,
    batch_size: int,
    replicas: int,
    accumulate: int,
    drop_last: bool,
    whole: int | None,
) -> Epoch:
    """Have all replicas read an epoch."""
    loader = DataLoader(
        TensorDataset(torch.arange(samples)), batch_size=batch_size, drop_last=drop_last
    )
    each = [
        feed_creation.feed_training(
            loader,
            feeds.Share(replica, replicas, seed=3),
            accumulate=accumulate,
            global_batch_size=whole,
            in_global_order=True,
        )
        for replica in range(replicas)
    ]
    assert len({(feed.samples_per_step, feed.steps) for feed in each}) == 1
    seen: list[list[int]] = [[]]
    for batches in zip(*(feed.epoch(1, 0) for feed in each), strict=True):
        assert len({(batch.ends_step, batch.ends_epoch) for batch in batches}) == 1
        for batch in batches:
            # A replica without a sample of its own reads one of the others', which counts nothing.
            seen[-1] += batch.data[0].tolist() if batch.samples else []
        if batches[0].ends_step and not batches[0].ends_epoch:
            seen.append([])
    assert batches[0].ends_step
    assert batches[0].ends_epoch
    return Epoch(each[0].samples_per_step, each[0].steps, seen)


@STRATEGIES
def test_what_is_announced_is_what_the_replicas_read(name):
    cls = strategies.find(name).cls
    assert layouts(cls)
    for devices, nodes in layouts(cls):
        replicas = strategies.create(name, {}).replicas(devices, nodes)
        assert replicas == readers(name, devices, nodes)
        for case in CASES:
            check_case(replicas, *case)


def check_case(
    replicas: int, samples: int, size: int, accumulate: int, drop_last: bool, whole: int | None
) -> None:
    """Read with so many replicas, and compare; or see it refused."""
    case = (samples, size, replicas, accumulate, drop_last, whole)
    expected = whole or size * replicas * accumulate
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


# --- real runs -------------------------------------------------------------------------------

TWO = ("--trainer.devices", "2", "--trainer.strategy")
TWICE = ("--trainer.accumulate_grad_batches", "2")
WHOLE = ("--trainer.global_batch_size", "20")
LINEAR = ("--trainer.learning_rate_scaling", "linear")
STEPS = ("--trainer.max_steps", "4")


@pytest.mark.parametrize(
    ("options", "nodes", "batch", "parts"),
    [
        ((*TWO, "ddp", *LINEAR), 1, 8, "4 per device, 2 replicas, 1 accumulated"),
        ((*TWO, "ddp", *TWICE, *STEPS), 1, 16, "4 per device, 2 replicas, 2 accumulated"),
        ((*TWO, "ddp", *TWICE, *WHOLE), 1, 20, "5 per device, 2 replicas, 2 accumulated"),
        (
            (*TWO, "dp", *TWICE, *LINEAR),
            1,
            8,
            "4 per process of 2 devices, 1 replica, 2 accumulated",
        ),
        ((*TWO, "ddp2", *STEPS), 1, 4, "4 per process of 2 devices, 1 replica, 1 accumulated"),
        ((*TWO, "ddp2", *LINEAR), 2, 8, "4 per process of 2 devices, 2 replicas, 1 accumulated"),
        ((*TWICE, *WHOLE, "--trainer.devices", "1"), 1, 20, "10 per device, 1 replica, 2 accumul"),
    ],
    ids=["ddp", "ddp 2", "ddp 2 global", "dp 2", "ddp2", "ddp2 on two nodes", "alone"],
)
@pytest.mark.slow
def test_a_run_announces_what_its_ranks_read(tmp_path, options, nodes, batch, parts):
    arguments: list[str | Path] = [
        *("-m", PACKAGE, "fit", "--trainer.accelerator", "cpu", "--trainer.max_epochs", "2"),
        *("--trainer.default_root_dir", tmp_path / "runs", "--trainer.loggers", "[]"),
        *("--model", "steps_subject.Reads", "--model.folder", tmp_path),
    ]
    first, *others = run_nodes([*arguments, *options], nodes)
    assert [each.returncode for each in (first, *others)] == [0] * nodes, first.stderr
    assert f"effective batch size {batch} ({parts}" in first.stdout
    factor = re.search(r"learning rates times (\S+)", first.stdout)
    assert (factor and float(factor[1])) == (batch / 4 if "linear" in options else None)

    steps = -(-SAMPLES // batch)
    total = min(2 * steps, 4 if STEPS[0] in options else 2 * steps)
    assert f"steps per epoch {steps}, epochs 2, total steps {total}\n" in first.stdout
    seen = what_was_read(tmp_path)
    assert sorted(seen) == [(step // steps, step) for step in range(total)]
    for (epoch, step), read_in_step in seen.items():
        is_last = (step + 1) % steps == 0
        assert len(read_in_step) == (SAMPLES - batch * (steps - 1) if is_last else batch)
        if is_last:
            whole = [seen[each] for each in seen if each[0] == epoch]
            assert sorted(itertools.chain(*whole)) == list(range(SAMPLES))


def what_was_read(folder: Path) -> dict[tuple[int, int], list[float]]:
    """The samples of each optimizer step, by epoch and step, over all ranks."""
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    for file in folder.glob("reads-*"):
        for line in file.read_text().splitlines():
            epoch, step, samples = json.loads(line)
            seen[epoch, step] += samples
    return seen
