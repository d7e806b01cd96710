"""The order of a large dataset is computed, not held: in constant memory, from any position on."""

import tracemalloc
from collections import Counter
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from my_project_trainer.data import feed_creation, sampling
from my_project_trainer.data.feed import OrderedFeed
from my_project_trainer.data.randomness import permuted
from torch.utils.data import DataLoader, TensorDataset

BILLION = 10**9


@given(st.integers(1, 3000), st.integers(0, 2**62))
def test_each_number_is_there_once(count: int, key: int) -> None:
    assert sorted(permuted(range(count), count, key)) == list(range(count))


@given(st.integers(1, BILLION), st.integers(0, 2**62), st.data())
def test_a_position_alone_has_the_same_number(count: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9))
    alone = [permuted([position], count, key)[0] for position in positions]
    assert permuted(positions, count, key) == alone


def test_each_permutation_of_four_is_as_frequent() -> None:
    draws = 24 * 250
    counts = Counter(tuple(permuted(range(4), 4, key)) for key in range(draws))
    assert len(counts) == 24
    # Chi-squared with 23 degrees of freedom is below 60 but for one of 30,000 sets of keys.
    assert sum((frequency - 250) ** 2 / 250 for frequency in counts.values()) < 60


def test_positions_and_numbers_are_not_correlated() -> None:
    count = 100_000
    numbers = np.array(permuted(range(count), count, 3), dtype=float)
    # Of independent ones, the standard deviation is 0.003.
    assert abs(np.corrcoef(np.arange(count), numbers)[0, 1]) < 0.015
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015


def order(samples: int, replica: int, replicas: int, epoch: int = 0, start: int = 0) -> Any:
    plan = sampling.BatchPlan(samples, 32 // replicas, replicas)
    options = {"seed": 1, "shuffle": True, "keyed": False, "fill": True, "is_held": False}
    made = sampling.GlobalOrder(plan, replica, **options)
    made.epoch, made.start = epoch, start
    return made


def test_a_billion_samples_need_no_memory() -> None:
    batches = list(islice(order(BILLION, 0, 1), 300))
    tracemalloc.start()
    tail = list(islice(order(BILLION, 0, 1, start=100), 200))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tail == batches[100:]
    assert len({index for batch in batches for index in batch}) == 300 * 32
    assert peak < 2**20
    assert next(iter(order(BILLION, 0, 1, epoch=1))) != batches[0]
    assert len(list(order(BILLION, 0, 1, start=BILLION // 32 - 1))) == 1


@given(st.integers(1, 90), st.sampled_from([1, 2, 4]))
def test_replicas_divide_the_same_order(samples: int, replicas: int) -> None:
    alone = list(order(samples, 0, 1))
    shared = [list(order(samples, replica, replicas)) for replica in range(replicas)]
    for number, batch in enumerate(alone):
        shares = [replica_batches[number] for replica_batches in shared][: len(batch)]
        assert list(chain.from_iterable(shares)) == batch


@pytest.mark.parametrize("more", [0, 1])
def test_which_orders_are_held(more: int) -> None:
    dataset = TensorDataset(torch.empty(sampling.MOST_HELD + more, 0))
    share = feed_creation.Share(0, 1, 0)
    options: dict[str, Any] = {"accumulate": 1, "global_batch_size": None, "in_global_order": True}
    feed = feed_creation.feed_training(DataLoader(dataset, batch_size=8), share, **options)
    assert isinstance(feed, OrderedFeed)
    assert feed._order.is_held == (not more)
