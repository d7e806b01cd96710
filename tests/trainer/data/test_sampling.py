"""The order of samples is a function of seed, epoch and step alone."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from my_project_trainer.data import sampling
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

BatchPlan, GlobalOrder = sampling.BatchPlan, sampling.GlobalOrder

plans = st.builds(
    BatchPlan,
    samples=st.integers(1, 90),
    batch_size=st.integers(1, 7),
    replicas=st.integers(1, 5),
    accumulate=st.integers(1, 4),
    drop_last=st.booleans(),
)


def make_order(plan: Any, replica: int = 0, **options: Any) -> Any:
    defaults = {"seed": 1, "shuffle": True, "keyed": False, "fill": True}
    return GlobalOrder(plan, replica, **(defaults | options))


@given(plans)
def test_bounds_of_replicas_partition_each_micro_batch(plan: Any) -> None:
    position = 0
    for batch in range(plan.batches):
        bounds = [plan.bounds(batch, replica) for replica in range(plan.replicas)]
        for begin, end in bounds:
            assert begin == position
            assert end >= begin
            position = end
        sizes = [end - begin for begin, end in bounds]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) <= plan.batch_size
    assert position == plan.samples_used


@given(plans, st.integers(0, 3), st.integers(0, 2**62))
def test_every_sample_once_an_epoch(plan: Any, epoch: int, seed: int) -> None:
    seen: list[int] = []
    for replica in range(plan.replicas):
        order = make_order(plan, replica, seed=seed)
        order.epoch, order.start = epoch, 0
        batches = list(order)
        assert len(batches) == len(order) == plan.batches
        for batch, indices in enumerate(batches):
            begin, end = plan.bounds(batch, replica)
            assert len(indices) == max(end - begin, 1)
            seen += indices if end > begin else []
    assert len(seen) == len(set(seen)) == plan.samples_used
    assert set(seen) <= set(range(plan.samples))


def steps_of(plan: Any, epoch: int = 0) -> list[list[int]]:
    """The samples of each optimizer step, in order."""
    orders = []
    for replica in range(plan.replicas):
        order = make_order(plan, replica, fill=False)
        order.epoch, order.start = epoch, 0
        batches = iter(order)
        bounds = [plan.bounds(batch, replica) for batch in range(plan.batches)]
        orders.append([next(batches) if end > begin else [] for begin, end in bounds])
    steps: list[list[int]] = [[] for _ in range(-(-plan.batches // plan.accumulate))]
    for batch, replicas in enumerate(zip(*orders, strict=True)):
        for indices in replicas:
            steps[batch // plan.accumulate] += indices
    return steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [24, 100, 107])
def test_the_same_global_batches_on_any_number_of_replicas(samples: int, drop_last: bool) -> None:
    ways = [(12, 1, 1), (6, 2, 1), (6, 1, 2), (4, 3, 1), (2, 3, 2), (1, 12, 1), (3, 2, 2)]
    plans = [BatchPlan(samples, *way, drop_last=drop_last) for way in ways]
    alone, *others = [steps_of(plan) for plan in plans]
    assert len(alone) == plans[0].batches
    for other in others:
        assert other == alone


def test_a_new_order_each_epoch_and_for_each_seed() -> None:
    plan = BatchPlan(100, 100)
    order = make_order(plan)
    (first,) = order
    order.epoch, order.start = 1, 0
    (second,) = order
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert next(iter(make_order(plan, seed=2))) not in (first, second)
    assert next(iter(make_order(plan))) == first


def test_the_order_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    first = list(make_order(BatchPlan(10, 2)))
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    assert list(make_order(BatchPlan(10, 2))) == first


def test_a_replica_without_samples_is_filled_in_training_only() -> None:
    plan = BatchPlan(samples=5, batch_size=2, replicas=2)
    assert plan.bounds(1, 1) == (5, 5)
    assert plan.weight(1, 1) == 0.0
    assert list(make_order(plan, 1, shuffle=False)) == [[2, 3], [4]]
    assert list(make_order(plan, 1, shuffle=False, fill=False)) == [[2, 3]]


def test_keys_are_epoch_and_index() -> None:
    order = make_order(BatchPlan(4, 2), shuffle=False, keyed=True)
    order.epoch, order.start = 7, 1
    assert list(order) == [[(7, 2), (7, 3)]]


class Drawing(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        drawn = [float(torch.rand(1)), float(np.random.rand()), random.random()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)

    def __len__(self) -> int:
        return 12


class DrawingBatches(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11)), min_size=1, max_size=8))
def test_a_key_gives_the_same_draws_whatever_came_before(keys: list[tuple[int, int]]) -> None:
    keyed = sampling.KeyedDataset(Drawing(), seed=5)
    expected = {key: keyed[key] for key in keys}
    for key in reversed(keys):
        torch.rand(3), np.random.rand(2), random.random()
        assert torch.equal(keyed[key], expected[key])


def test_another_epoch_index_or_seed_gives_other_draws() -> None:
    keyed, other = (sampling.KeyedDataset(Drawing(), seed) for seed in (5, 6))
    drawn = torch.stack([keyed[0, 0], keyed[0, 1], keyed[1, 0], other[0, 0]])[:, 1:]
    assert len(set(drawn.flatten().tolist())) == 12
    assert len(keyed) == 12


def read(loader: DataLoader[Tensor], start: int = 0, replica: int = 0, replicas: int = 1) -> Tensor:
    order = make_order(BatchPlan(12, 4 // replicas, replicas), replica, keyed=True)
    order.epoch, order.start = 1, start
    return torch.stack(list(sampling.order_globally(loader, order)))


def test_samples_are_the_same_with_and_without_workers_and_from_the_middle() -> None:
    alone = read(DataLoader(Drawing(), batch_size=4))
    assert torch.equal(read(DataLoader(Drawing(), batch_size=4, num_workers=2)), alone)
    assert torch.equal(read(DataLoader(Drawing(), batch_size=4), start=2), alone[2:])


@pytest.mark.parametrize("dataset", [Drawing(), Subset(Drawing(), range(12))])
def test_samples_are_the_same_on_any_number_of_replicas(dataset: Dataset[Tensor]) -> None:
    shared = [read(DataLoader(dataset), replica=replica, replicas=2) for replica in (0, 1)]
    assert torch.equal(torch.cat(shared, dim=1), read(DataLoader(Drawing())))


def test_batches_made_at_once_are_the_same_from_the_middle() -> None:
    for dataset in (DrawingBatches(), Subset(DrawingBatches(), range(12))):
        batches = read(DataLoader(dataset))
        torch.rand(5)
        assert torch.equal(read(DataLoader(dataset), start=1), batches[1:])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


DATA = TensorDataset(torch.arange(8.0))


@pytest.mark.parametrize(
    ("loader", "can"),
    [
        pytest.param(DataLoader(DATA, 2), True, id="in order"),
        pytest.param(DataLoader(DATA, 2, shuffle=True), True, id="shuffled"),
        pytest.param(DataLoader(DATA, sampler=[3, 1]), False, id="own sampler"),
        pytest.param(
            DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 8, 8)), True, id="weighted"
        ),
        pytest.param(DataLoader(DATA, batch_sampler=[[0, 1]]), False, id="own batch sampler"),
        pytest.param(DataLoader(DATA, batch_size=None), False, id="no batches"),
        pytest.param(DataLoader(Stream()), False, id="iterable"),
        pytest.param([1, 2], False, id="list"),
    ],
)
def test_only_torch_s_own_orders_are_replaced(loader: Any, can: bool) -> None:
    assert sampling.can_be_ordered(loader) is can


def test_tensors_alone_need_no_keys() -> None:
    assert not sampling.needs_keys(DataLoader(DATA, 2))
    assert sampling.needs_keys(DataLoader(Drawing(), 2))
    assert sampling.needs_keys(DataLoader(DATA, 2, collate_fn=list))


def test_an_ordered_loader_keeps_the_user_s_options() -> None:
    plain = DataLoader(Drawing(), 4, collate_fn=list, num_workers=1, prefetch_factor=3, timeout=900)
    made = sampling.order_globally(plain, make_order(BatchPlan(12, 4), keyed=True))
    for option in ("collate_fn", "num_workers", "prefetch_factor", "timeout", "pin_memory"):
        assert getattr(made, option) == getattr(plain, option)
