"""Batches on their way to the loop, each with what the loop must know of it."""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from . import distributed, randomness, scaling
from .errors import UserError
from .sampling import BatchPlan, GlobalOrder, can_be_ordered, needs_keys, order_globally


class MicroBatch(NamedTuple):
    """A batch of one replica.

    ``samples``: of this replica that count; ``weight``: factor of its mean loss.
    """

    data: Any
    number: int
    samples: int
    weight: float
    ends_step: bool
    ends_epoch: bool


class Feed(Protocol):
    """Gives the batches of an epoch, from any one on."""

    batches: int | None
    """Micro-batches of an epoch; ``None`` if that cannot be known."""
    samples_per_step: int | None
    """The effective batch size; ``None`` if that cannot be known."""
    accumulate: int
    """Micro-batches of an optimizer step."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps of an epoch; ``None`` if that cannot be known."""
        return None if self.batches is None else -(-self.batches // self.accumulate)

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """The batches of an epoch from number ``start`` on."""
        ...


@dataclass(frozen=True)
class Share:
    """Who reads: one of so many data replicas, under the run's seed."""

    replica: int
    replicas: int
    seed: int


class OrderedFeed(Feed):
    """Reads a loader in the global order; starting in the middle costs nothing.

    Args:
        loader: whose batch sampler is ``order``.
        order: of the samples.
        seed: of the run.
    """

    def __init__(self, loader: DataLoader[Any], order: GlobalOrder, seed: int) -> None:
        self._loader = loader
        self._order = order
        self._plan: BatchPlan = order.plan
        # In a worker process, or where nothing random is drawn, the model's randomness is safe.
        isolate = loader.num_workers == 0 and order.keyed
        self._stream = randomness.Stream(seed) if isolate else None
        self.batches: int | None = order.plan.batches
        self.samples_per_step: int | None = order.plan.global_batch
        self.accumulate = order.plan.accumulate

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        plan, replica = self._plan, self._order.replica
        last, accumulate = plan.batches - 1, plan.accumulate
        first_irregular = plan.samples // plan.global_batch * accumulate
        self._order.set_position(epoch, start)
        batches = iter(self._loader)
        for index, data in enumerate(_isolated(batches, self._stream), start):
            if index < first_irregular:
                samples, weight = plan.batch_size, 1.0 / accumulate
            else:
                begin, end = plan.part(index, replica)
                samples, weight = end - begin, plan.weight(index, replica)
            ends_epoch = index == last
            yield MicroBatch(
                data,
                index,
                samples,
                weight,
                ends_epoch or (index + 1) % accumulate == 0,
                ends_epoch,
            )


class ReplayFeed(Feed):
    """Reads any iterable as it is; starting in the middle reads, and drops, what comes before.

    For iterable data sets and the user's own samplers. Every process must get the same number of
    batches: this is watched, so that a shorter one is an error and not a hang.

    Args:
        loader: a ``DataLoader`` or another iterable of batches.
        share: whose it is; what the loader draws in this process comes from (seed, epoch, replica).
        accumulate: micro-batches of an optimizer step.
    """

    def __init__(self, loader: Iterable[Any], share: Share, accumulate: int) -> None:
        self._loader = loader
        self._replica = share.replica
        self._seed = share.seed
        self.accumulate = accumulate
        self.batches = _length(loader)
        batch_size = getattr(loader, "batch_size", None)
        self.samples_per_step = batch_size * share.replicas * accumulate if batch_size else None

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        for part in ("sampler", "batch_sampler", "dataset"):
            if hasattr(getattr(self._loader, part, None), "set_epoch"):
                getattr(self._loader, part).set_epoch(epoch)
        stream = randomness.Stream(randomness.mix(self._seed, epoch, self._replica))
        for owner in (self._loader, getattr(self._loader, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(randomness.mix(self._seed, epoch, self._replica))
        with stream:
            batches = iter(self._loader)
        index = -1
        for index, (data, is_last) in enumerate(_with_last(_isolated(batches, stream))):
            ends_epoch = _all_end_alike(index + 1, is_last)
            if index >= start:
                ends_step = ends_epoch or (index + 1) % self.accumulate == 0
                samples = batch_length(data)
                weight = 1.0 / self.accumulate
                yield MicroBatch(data, index, samples, weight, ends_step, ends_epoch)
        if index < 0:
            raise UserError(f"rank {distributed.rank()}: the loader gave no batch")


def feed_training(
    loader: Iterable[Any],
    share: Share,
    *,
    accumulate: int,
    global_batch_size: int | None,
    in_global_order: bool,
) -> Feed:
    """Training batches: shuffled anew each epoch, every replica taking every step.

    Args:
        loader: the user's.
        share: whose part is read.
        accumulate: micro-batches of an optimizer step.
        global_batch_size: replaces the loader's batch size, where the order is the trainer's.
        in_global_order: False reads the loader as it is.

    Raises:
        UserError: there is nothing to read.
    """
    if not (in_global_order and can_be_ordered(loader)):
        return ReplayFeed(loader, share, accumulate)
    batch_size = loader.batch_size or 1
    if global_batch_size is not None:
        batch_size = scaling.device_batch_size(global_batch_size, share.replicas, accumulate)
    samples = _samples(loader)
    plan = BatchPlan(samples, batch_size, share.replicas, accumulate, loader.drop_last)
    if plan.batches == 0:
        raise UserError(
            f"the data set has {samples} samples and a step takes {plan.global_batch}: "
            "with drop_last there is nothing to read"
        )
    return _ordered(loader, plan, share, training=True)


def feed_evaluation(loader: Iterable[Any], share: Share, *, in_global_order: bool) -> Feed:
    """Validation, test or prediction batches: each sample once, in order."""
    if not (in_global_order and can_be_ordered(loader)):
        return ReplayFeed(loader, share, accumulate=1)
    plan = BatchPlan(_samples(loader), loader.batch_size or 1, share.replicas)
    return _ordered(loader, plan, share, training=False)


def _ordered(loader: DataLoader[Any], plan: BatchPlan, share: Share, training: bool) -> OrderedFeed:
    keyed = needs_keys(loader)
    order = GlobalOrder(
        plan, share.replica, seed=share.seed, shuffle=training, keyed=keyed, fill=training
    )
    return OrderedFeed(order_globally(loader, order), order, share.seed)


def _samples(loader: DataLoader[Any]) -> int:
    return len(loader.dataset)  # type: ignore[arg-type]


def _isolated(batches: Iterator[Any], stream: randomness.Stream | None) -> Iterator[Any]:
    if stream is None:
        return batches
    return _drawn_from(batches, stream)


def _drawn_from(batches: Iterator[Any], stream: randomness.Stream) -> Iterator[Any]:
    end = object()
    while True:
        with stream:
            batch = next(batches, end)
        if batch is end:
            return
        yield batch


def _with_last(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    end = object()
    batch = next(batches, end)
    while batch is not end:
        following = next(batches, end)
        yield batch, following is end
        batch = following


def _all_end_alike(count: int, is_last: bool) -> bool:
    if distributed.world_size() == 1:
        return is_last
    flag = float(is_last)
    both_ways = distributed.all_reduce(torch.tensor([flag, -flag]), "max").tolist()
    if both_ways[0] != -both_ways[1]:
        has = "ended" if is_last else "has more"
        raise UserError(
            f"rank {distributed.rank()}: the loader {has} after {count} batches, unlike another "
            "rank's; give every rank the same number of batches"
        )
    return is_last


def batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor found in it; 1 without any."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    values = batch.values() if isinstance(batch, dict) else batch
    if isinstance(values, list | tuple) or isinstance(batch, dict):
        for value in values:
            length = batch_length(value)
            if length != 1:
                return length
    return 1


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of an iterable data set that has no length
        return None
