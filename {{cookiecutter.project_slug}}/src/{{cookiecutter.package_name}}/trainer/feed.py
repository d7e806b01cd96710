"""Batches on their way to the loop, each with what the loop must know of it."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from . import distributed, randomness
from .errors import UserError
from .sampling import BatchPlan, GlobalOrder


class MicroBatch(NamedTuple):
    """A batch of one replica.

    ``samples``: of this replica that count; ``weight``: factor of its mean loss.
    """

    data: Any
    index: int
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

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """The batches of an epoch from number ``start`` on."""


class OrderedFeed:
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
                data, index, samples, weight, ends_epoch or (index + 1) % accumulate == 0, ends_epoch
            )


class ReplayFeed:
    """Reads any iterable as it is; starting in the middle reads, and drops, what comes before.

    For iterable data sets and the user's own samplers. Every process must get the same number of
    batches: this is watched, so that a shorter one is an error and not a hang.

    Args:
        loader: a ``DataLoader`` or another iterable of batches.
        accumulate: micro-batches of an optimizer step.
        replica: this process among the readers.
        replicas: how many there are.
        seed: of the run; what the loader draws in this process comes from (seed, epoch, replica).
    """

    def __init__(
        self, loader: Iterable[Any], *, accumulate: int, replica: int, replicas: int, seed: int
    ) -> None:
        self._loader = loader
        self._replica = replica
        self._seed = seed
        self.accumulate = accumulate
        self.batches = len(loader) if _has_length(loader) else None
        batch_size = getattr(loader, "batch_size", None)
        self.samples_per_step = batch_size * replicas * accumulate if batch_size else None

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        for part in ("sampler", "batch_sampler", "dataset"):
            if hasattr(getattr(self._loader, part, None), "set_epoch"):
                getattr(self._loader, part).set_epoch(epoch)
        stream = randomness.Stream(randomness.mix(self._seed, epoch, self._replica))
        with stream:
            batches = iter(self._loader)
        index = -1
        for index, (data, is_last) in enumerate(_with_last(_isolated(batches, stream))):
            ends_epoch = _all_end_alike(index + 1, is_last)
            if index >= start:
                ends_step = ends_epoch or (index + 1) % self.accumulate == 0
                samples = batch_length(data)
                yield MicroBatch(data, index, samples, 1.0 / self.accumulate, ends_step, ends_epoch)
        if index < 0:
            raise UserError(f"rank {distributed.rank()}: the loader gave no batch")


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
            f"rank {distributed.rank()}: the loader {has} after {count} batches, unlike another rank's; "
            "give every rank the same number of batches"
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


def _has_length(loader: object) -> bool:
    try:
        len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return False
    return True
