"""Batches on their way to the loop: where steps and epochs end, and starting in the middle."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from my_project_trainer import errors
from my_project_trainer.data import feed as feeds
from my_project_trainer.data import feed_creation, randomness
from my_project_trainer.data.samples import batch_length
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

Share = feeds.Share
ALONE = Share(replica=0, replicas=1, seed=3)


class Noisy(Dataset[Tensor]):
    """Ten samples with noise from all three libraries."""

    def __getitem__(self, index: int) -> Tensor:
        noise = [float(torch.rand(1)), float(np.random.rand()), random.random()]
        return torch.tensor([float(index), *noise], dtype=torch.float64)

    def __len__(self) -> int:
        return 10


class NoisyStream(IterableDataset[Tensor]):
    """The same as a stream of a length that nobody knows."""

    def __iter__(self) -> Iterator[Tensor]:
        samples = Noisy()
        return (samples[index] for index in range(len(samples)))


class Backwards(Sampler[int]):
    """A user's own sampler; every epoch starts elsewhere, by chance."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        first = int(torch.randint(10, (1,))) + self.epoch
        return ((first - step) % 10 for step in range(10))


class Generated:
    """No DataLoader at all: anything that can be iterated over."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(5):
            yield torch.rand(2)


LOADERS: dict[str, Callable[[], Any]] = {
    "ordered": lambda: DataLoader(Noisy(), 2),
    "ordered with workers": lambda: DataLoader(Noisy(), 2, num_workers=1),
    "iterable": lambda: DataLoader(NoisyStream(), 2),
    "iterable with a worker": lambda: DataLoader(NoisyStream(), 2, num_workers=1),
    "own sampler": lambda: DataLoader(Noisy(), 2, sampler=Backwards()),
    "generated": Generated,
    "list": lambda: [torch.ones(2), torch.zeros(2), torch.ones(2)],
}
KINDS = pytest.mark.parametrize("kind", LOADERS)


def training(loader: Any, share: Any = ALONE, **options: Any) -> Any:
    defaults = {"accumulate": 1, "global_batch_size": None, "in_global_order": True}
    return feed_creation.feed_training(loader, share, **(defaults | options))


def data_of(batches: Iterator[Any]) -> list[list[Any]]:
    return [batch.data.tolist() for batch in batches]


def tensors(count: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(count))), batch_size, **options)


def test_ordered_batches_say_where_steps_and_the_epoch_end() -> None:
    feed = training(tensors(9, 2), accumulate=2)
    assert (feed.batches, feed.steps, feed.samples_per_step) == (5, 3, 4)
    batches = list(feed.epoch(0, 0))
    assert [batch.number for batch in batches] == [0, 1, 2, 3, 4]
    assert [batch.samples for batch in batches] == [2, 2, 2, 2, 1]
    assert [batch.weight for batch in batches] == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert [batch.ends_step for batch in batches] == [False, True, False, True, True]
    assert [batch.ends_epoch for batch in batches] == [False] * 4 + [True]


def test_replayed_batches_say_where_steps_and_the_epoch_end() -> None:
    feed = training([torch.ones(3), torch.ones(3), torch.ones(1)], accumulate=2)
    assert (feed.batches, feed.steps, feed.samples_per_step) == (3, 2, None)
    batches = list(feed.epoch(0, 0))
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert [batch.samples for batch in batches] == [3, 3, 1]
    assert [batch.weight for batch in batches] == [0.5, 0.5, 1.0]
    assert [batch.ends_step for batch in batches] == [False, True, True]
    assert [batch.ends_epoch for batch in batches] == [False, False, True]


def test_a_stream_has_no_length_but_an_end() -> None:
    feed = training(DataLoader(NoisyStream(), 4), share=Share(0, 2, 3), accumulate=2)
    assert (feed.batches, feed.steps, feed.samples_per_step) == (None, None, 16)
    assert [batch.ends_epoch for batch in feed.epoch(0, 0)] == [False, False, True]


@settings(deadline=None, max_examples=40)
@given(
    more=st.integers(0, 29),
    batch_size=st.integers(1, 4),
    replicas=st.integers(1, 4),
    accumulate=st.integers(1, 3),
)
def test_weights_make_the_mean_of_the_global_batch(more, batch_size, replicas, accumulate):
    samples = batch_size * replicas * accumulate + more
    shares = [Share(replica, replicas, 0) for replica in range(replicas)]
    made = [training(tensors(samples, batch_size), each, accumulate=accumulate) for each in shares]
    ranks = [list(feed.epoch(0, 0)) for feed in made]
    totals, sums, counts = [0.0], [0.0], [0]
    for batches in zip(*ranks, strict=True):
        assert len({(batch.ends_step, batch.ends_epoch) for batch in batches}) == 1
        for batch in batches:
            totals[-1] += batch.weight * float(batch.data[0].mean()) / replicas
            sums[-1] += float(batch.data[0].sum()) if batch.samples else 0.0
            counts[-1] += batch.samples
        if batches[0].ends_step and not batches[0].ends_epoch:
            totals.append(0.0), sums.append(0.0), counts.append(0)
    assert sum(counts) == samples
    assert sum(sums) == sum(range(samples))
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    assert totals == pytest.approx(means)


@KINDS
def test_starting_in_the_middle_gives_the_tail(kind: str) -> None:
    uninterrupted = data_of(training(LOADERS[kind]()).epoch(1, 0))
    torch.rand(7), np.random.rand(3), random.random()
    fresh = training(LOADERS[kind]())
    assert data_of(fresh.epoch(1, 2)) == uninterrupted[2:]
    assert data_of(fresh.epoch(1, len(uninterrupted) - 1)) == uninterrupted[-1:]


def test_starting_in_the_middle_keeps_numbers_and_ends() -> None:
    for loader in (tensors(9, 2), [torch.ones(2)] * 5):
        batches = list(training(loader, accumulate=2).epoch(0, 0))
        rest = list(training(loader, accumulate=2).epoch(0, 3))
        assert [batch[1:] for batch in rest] == [batch[1:] for batch in batches[3:]]


def test_a_later_epoch_is_the_same_for_who_starts_there_with_a_generator_of_their_own() -> None:
    """The loader's own generator moves from epoch to epoch; one that resumes has not moved."""

    def loader() -> DataLoader[Any]:
        return DataLoader(Noisy(), 2, shuffle=True, generator=torch.Generator().manual_seed(11))

    uninterrupted = training(loader(), in_global_order=False)
    list(uninterrupted.epoch(0, 0))
    batches = data_of(uninterrupted.epoch(1, 0))
    assert data_of(training(loader(), in_global_order=False).epoch(1, 2)) == batches[2:]


@pytest.mark.parametrize("kind", ["ordered", "iterable", "own sampler", "generated"])
def test_each_epoch_draws_other_samples(kind: str) -> None:
    feed = training(LOADERS[kind]())
    assert data_of(feed.epoch(0, 0)) != data_of(feed.epoch(1, 0))


def test_replicas_draw_apart_from_a_stream() -> None:
    shares = [Share(replica, 2, 3) for replica in (0, 1)]
    first, second = (data_of(training(Generated(), share).epoch(0, 0)) for share in shares)
    assert first != second


def test_a_generator_that_is_used_up_is_one_line() -> None:
    feed = training(torch.ones(1) for _ in range(2))
    assert len(list(feed.epoch(0, 0))) == 2
    with pytest.raises(errors.UserError) as raised:
        list(feed.epoch(1, 0))
    assert raised.value.problems == ["rank 0: the loader yielded no batches"]


@KINDS
@pytest.mark.parametrize("in_global_order", [True, False])
def test_reading_leaves_the_global_generators_alone(kind: str, in_global_order: bool) -> None:
    before = randomness.Snapshot().state()
    for _ in training(LOADERS[kind](), in_global_order=in_global_order).epoch(0, 1):
        after = randomness.Snapshot().state()
        assert all(torch.equal(after[generator], before[generator]) for generator in before)
    feed = feed_creation.feed_evaluation(LOADERS[kind](), ALONE, in_global_order=in_global_order)
    assert list(feed.epoch(0, 0))
    after = randomness.Snapshot().state()
    assert all(torch.equal(after[generator], before[generator]) for generator in before)


@KINDS
def test_what_a_step_draws_does_not_change_what_is_read(kind: str) -> None:
    quiet = data_of(training(LOADERS[kind]()).epoch(0, 0))
    loud = []
    for batch in training(LOADERS[kind]()).epoch(0, 0):
        loud.append(batch.data.tolist())
        torch.rand(5), np.random.rand(5), random.random()
    assert loud == quiet


def test_a_global_batch_size_replaces_the_loader_s() -> None:
    loader = tensors(100, 7)
    for replicas, accumulate, size in [(1, 1, 24), (2, 1, 12), (3, 4, 2), (1, 8, 3)]:
        feed = training(loader, Share(0, replicas, 0), accumulate=accumulate, global_batch_size=24)
        assert feed.samples_per_step == 24
        assert feed.steps == 5
        assert next(feed.epoch(0, 0)).samples == size


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_step_larger_than_the_data_set_is_one_line(drop_last: bool) -> None:
    with pytest.raises(errors.ConfigurationError) as raised:
        training(tensors(7, 4, drop_last=drop_last), Share(0, 2, 0))
    problem = "batch_size=4 x 2 replicas x accumulate_grad_batches=1 = 8"
    reason = "an optimizer step takes more samples than the 7 of the dataset; use at most 7"
    assert raised.value.problems == [f"{problem}: {reason}"]
    assert training(tensors(8, 4, drop_last=drop_last), Share(0, 2, 0)).steps == 1


def test_more_micro_batches_than_a_loader_has_are_one_line() -> None:
    with pytest.raises(errors.ConfigurationError) as raised:
        training([torch.ones(2)] * 3, accumulate=4)
    reason = "an optimizer step takes more batches than the 3 of the loader; use at most 3"
    assert raised.value.problems == [f"accumulate_grad_batches=4: {reason}"]


def test_drop_last_leaves_out_the_step_that_is_not_full() -> None:
    feed = training(tensors(11, 2, drop_last=True), accumulate=2)
    assert (feed.batches, feed.steps) == (4, 2)
    batches = list(feed.epoch(0, 0))
    assert [batch.samples for batch in batches] == [2, 2, 2, 2]
    assert batches[-1].ends_epoch


def test_training_is_shuffled_and_evaluation_is_not() -> None:
    loader = tensors(20, 5)
    trained = [value for batch in training(loader).epoch(0, 0) for value in batch.data[0].tolist()]
    feed = feed_creation.feed_evaluation(loader, ALONE, in_global_order=True)
    evaluated = [value for batch in feed.epoch(0, 0) for value in batch.data[0].tolist()]
    assert evaluated == list(range(20))
    assert sorted(trained) == evaluated != trained


def test_without_the_global_order_a_loader_is_read_as_it_is() -> None:
    feed = training(tensors(6, 2), in_global_order=False)
    assert [batch.data[0].tolist() for batch in feed.epoch(0, 0)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("drop_last", "used"), [(False, 11), (True, 10)])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_evaluation_gives_each_sample_once(replicas: int, drop_last: bool, used: int) -> None:
    seen: list[float] = []
    for replica in range(replicas):
        share = Share(replica, replicas, 0)
        loader = tensors(11, 2, drop_last=drop_last)
        for batch in feed_creation.feed_evaluation(loader, share, in_global_order=True).epoch(0, 0):
            assert batch.samples == len(batch.data[0])
            seen += batch.data[0].tolist()
    assert sorted(seen) == list(range(used))


def test_what_has_no_samples_counts_as_one() -> None:
    """Of batches that have some, test_samples.py splits each kind."""
    assert {batch_length(batch) for batch in (torch.tensor(1.0), "text", None, [])} == {1}
