"""Samplers and loaders of the user: how many samples an epoch has, on any number of replicas."""

import random
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, cast

import numpy as np
import pytest
import torch
from my_project_trainer.data import feed as feeds
from my_project_trainer.data import feed_creation
from my_project_trainer.data.replay import ReplayFeed
from my_project_trainer.errors import UserError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

ALONE = feeds.Share(0, 1, 7)
GIVEN: dict[str, Any] = {"accumulate": 1, "global_batch_size": None, "in_global_order": True}
DATA = TensorDataset(torch.arange(30))
HALF = [2.0] * 15 + [0.0] * 15
SAMPLERS: dict[str, tuple[Any, int]] = {
    "some": (RandomSampler(DATA, num_samples=12), 12),
    "more than once": (RandomSampler(DATA, num_samples=72), 72),
    "with replacement": (RandomSampler(DATA, replacement=True, num_samples=48), 48),
    "of fewer": (RandomSampler(range(24)), 24),
    "weighted": (WeightedRandomSampler(HALF, 24), 24),
    "subset": (SubsetRandomSampler([*range(3, 27)]), 24),
}


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def numbers(data: Any) -> list[int]:
    indices: list[int] = data[0].tolist()
    return indices


def trained(loader: Any, replicas: int, epoch: int = 0, start: int = 0) -> list[list[int]]:
    """The global batches of an epoch; each replica has its part of them."""
    shares = [feeds.Share(replica, replicas, 7) for replica in range(replicas)]
    options = GIVEN | {"global_batch_size": 12}
    made = [feed_creation.feed_training(loader, share, **options) for share in shares]
    read = [[numbers(batch.data) for batch in feed.epoch(epoch, start)] for feed in made]
    return [joined(parts) for parts in zip(*read, strict=True)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_s_epoch_is_divided_among_replicas(name: str) -> None:
    sampler, count = SAMPLERS[name]
    loader = DataLoader(DATA, sampler=sampler, batch_size=12)
    alone = trained(loader, 1)
    assert sum(map(len, alone)) == count == len(sampler)
    assert trained(loader, 2) == trained(loader, 3) == alone
    assert trained(loader, 1, 1) != alone
    assert trained(loader, 2, 1, start=1) == trained(loader, 1, 1)[1:]


def test_what_a_sampler_draws_is_its_own() -> None:
    def drawn(name: str) -> list[int]:
        return joined(trained(DataLoader(DATA, sampler=SAMPLERS[name][0], batch_size=4), 1))

    assert len(set(drawn("some"))) == 12
    assert sorted(drawn("more than once")[:60]) == sorted([*range(30)] * 2)
    assert len(set(drawn("with replacement"))) < 48
    assert sorted(drawn("of fewer")) == list(range(24))
    assert max(drawn("weighted")) < 15
    assert sorted(drawn("subset")) == list(range(3, 27))


def doubled(samples: Any) -> list[torch.Tensor]:
    return [2 * column for column in default_collate(samples)]


def evaluated(loader: Any, replicas: int) -> list[list[int]]:
    """The batches of an evaluation, in their order over the replicas."""
    batches = []
    for replica in range(replicas):
        share = feeds.Share(replica, replicas, 7)
        feed = feed_creation.feed_evaluation(loader, share, in_global_order=True)
        batches += [(batch.number, replica, numbers(batch.data)) for batch in feed.epoch(0, 0)]
    return [batch for *_, batch in sorted(batches)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_evaluation_reads_the_same_batches_on_any_number_of_replicas(name: str) -> None:
    sampler, count = SAMPLERS[name]
    loader = DataLoader(DATA, sampler=sampler, batch_size=5)
    alone = evaluated(loader, 1)
    samples = joined(alone)
    assert samples == sorted(samples)
    assert len(samples) == count
    assert evaluated(loader, 2) == evaluated(loader, 3) == evaluated(loader, 1) == alone


def test_a_batch_sampler_that_is_given_keeps_its_size_and_its_last_batch() -> None:
    loader = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 8, drop_last=True))
    feed = feed_creation.feed_training(loader, ALONE, **GIVEN)
    assert [batch.samples for batch in feed.epoch(0, 0)] == [8, 8, 8]


def test_a_generator_that_is_not_used_is_said() -> None:
    for generator, lines in ((torch.Generator(), 1), (None, 0)):
        loader = DataLoader(DATA, 2, shuffle=True, generator=generator)
        assert len(feed_creation.feed_training(loader, ALONE, **GIVEN).remarks) == lines


class Drawing(RandomSampler):
    """Of a user: draws from a generator of its own."""


class Seeded(Drawing):
    def set_epoch(self, epoch: int) -> None: ...


def test_a_generator_that_a_resume_does_not_restore_is_said() -> None:
    def remarks(sampler: Any, **attributes: Any) -> list[str]:
        vars(sampler).update(attributes)
        return ReplayFeed(DataLoader(DATA, 2, sampler=sampler), ALONE, 1, "refuse", None).remarks

    for generator in (np.random.default_rng(5), random.Random(5), torch.Generator()):
        (line,) = remarks(Drawing(DATA), rng=generator)
        assert line.startswith("Drawing.rng draws from its beginning again after a resume")
        assert remarks(Seeded(DATA), rng=generator) == []
    assert remarks(Drawing(DATA), generator=torch.Generator()) == []


class Doubled(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ([batch[0] * 2] for batch in super().__iter__())


class Ahead(DataLoader[Any]):
    """Reads by an iterator of its own."""

    def _get_iterator(self) -> Any:
        inner: Iterator[Any] = super()._get_iterator()
        return ([batch[0] * 2] for batch in inner)


class Collating(DataLoader[Any]):
    """Like graphs' loaders: a function of its own makes batches."""

    def __init__(self, dataset: Any, factor: int, **options: Any) -> None:
        self.factor = factor
        super().__init__(dataset, collate_fn=self._collated, **options)

    def _collated(self, samples: list[Any]) -> list[Any]:
        return [torch.stack([sample[0] for sample in samples]) * self.factor]


@pytest.mark.parametrize("kind", [Doubled, Ahead])
def test_a_loader_with_iteration_of_its_own_is_read_as_it_is(kind: Any) -> None:
    loader = kind(DATA, batch_size=6, shuffle=True)
    feed = feed_creation.feed_evaluation(loader, ALONE, in_global_order=True)
    assert isinstance(feed, ReplayFeed)
    read = [numbers(batch.data) for batch in feed.epoch(0, 0)]
    assert sorted(joined(read)) == list(range(0, 60, 2))


def test_a_loader_with_a_collate_fn_of_its_own_is_put_into_the_global_order() -> None:
    loader = Collating(DATA, 3, batch_size=12)
    assert trained(loader, 2) == trained(loader, 1)
    assert sorted(joined(trained(loader, 3))) == list(range(0, 90, 3))


def test_a_loader_that_a_hook_changes_is_read_as_it_is_then() -> None:
    def sums(epoch: int) -> list[int]:
        return sorted(int(batch.data[0].sum()) for batch in feed.epoch(epoch, 0))

    loader = DataLoader(TensorDataset(torch.ones(12, dtype=torch.int)), batch_size=4)
    feed = feed_creation.feed_training(loader, ALONE, **GIVEN)
    assert sums(0) == [4, 4, 4]
    loader.collate_fn = doubled
    assert sums(1) == [8, 8, 8]
    loader.num_workers, loader.prefetch_factor = 1, 2
    assert sums(2) == [8, 8, 8]
    cast(Any, loader.batch_sampler).batch_size = 6
    with pytest.raises(UserError, match="the loader's batch has 6 samples, and had 4 when"):
        sums(3)
