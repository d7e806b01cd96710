"""Global-order sampling: the samples of a batch depend only on seed, epoch and step.

A *global batch*, the samples of one optimizer step, is split into micro-batches, and each of them
over the replicas. So the same global batch size gives the same training on any number of processes,
a step number is enough to resume, and augmentation is keyed by (seed, epoch, sample index).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeGuard

import torch
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from . import randomness

# Above it, the order of an epoch is computed batch by batch instead of being held.
MOST_HELD = 2**20
_COMPUTED_AT_ONCE = 4096

Key = int | tuple[int, int]


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch is split into batches.

    ``samples`` are those of the dataset, ``batch_size`` is that of one replica's micro-batch,
    ``accumulate`` the number of micro-batches per optimizer step. ``drop_last``: without a last
    global batch that is not full. ``most``: maximum number of samples per epoch; ``None``: all.
    """

    samples: int
    batch_size: int
    replicas: int = 1
    accumulate: int = 1
    drop_last: bool = False
    most: int | None = None

    @cached_property
    def micro_batch(self) -> int:
        """Samples in a full micro-batch, over all replicas."""
        return self.batch_size * self.replicas

    @cached_property
    def global_batch(self) -> int:
        """Samples in a full optimizer step: the effective batch size."""
        return self.micro_batch * self.accumulate

    @cached_property
    def samples_used(self) -> int:
        """Samples used per epoch."""
        used = self.samples - (self.samples % self.global_batch if self.drop_last else 0)
        return used if self.most is None else min(used, self.most)

    @cached_property
    def batches(self) -> int:
        """Micro-batches per epoch; the same for every replica."""
        return -(-self.samples_used // self.micro_batch)

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.samples_used // self.global_batch)

    def part(self, batch: int, replica: int) -> tuple[int, int]:
        """Start and end of a replica's part of a micro-batch in the epoch's order.

        In a smaller last micro-batch, the sizes of the parts differ by at most one sample. The
        first replicas have the larger parts; the last may have none.
        """
        start = batch * self.micro_batch
        size = min(self.micro_batch, self.samples_used - start)
        smallest, larger = divmod(size, self.replicas)
        begin = start + replica * smallest + min(replica, larger)
        return begin, begin + smallest + (replica < larger)

    def weight(self, batch: int, replica: int) -> float:
        """Factor of a replica's mean loss.

        The average over replicas, summed over a step, is then the mean over the global batch.
        """
        first = batch - batch % self.accumulate
        in_step = min(self.global_batch, self.samples_used - first * self.micro_batch)
        if in_step == self.global_batch:
            return 1.0 / self.accumulate
        begin, end = self.part(batch, replica)
        return (end - begin) * self.replicas / in_step


@dataclass(eq=False)
class GlobalOrder(Sampler[list[Key]]):
    """Batch sampler of one replica, in the global order.

    ``keyed``: yield ``(epoch, index)`` for :class:`KeyedDataset` instead of indices. ``fill``: if
    the replica has no sample in a last batch, yield one of another replica, with weight 0 in the
    plan, so that every replica takes part in every step. ``is_held``: shuffle by
    ``torch.randperm``, of which every rank holds 8 bytes per sample; older checkpoints need it.
    """

    plan: BatchPlan
    replica: int
    seed: int
    shuffle: bool
    keyed: bool
    fill: bool
    epoch: int = 0
    start: int = 0
    is_held: bool = True

    def set_position(self, epoch: int, batch: int) -> None:
        """Set the epoch and batch at which the next iteration starts."""
        self.epoch, self.start = epoch, batch

    def __len__(self) -> int:
        begin, end = self.plan.part(self.plan.batches - 1, self.replica)
        return self.plan.batches - (begin == end and not self.fill)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, batches = self.epoch, range(self.start, len(self))
        for indices in self._shuffled(batches) if self.shuffle else map(self._positions, batches):
            yield [(epoch, index) for index in indices] if self.keyed else list(indices)

    def _positions(self, batch: int) -> range:
        """Positions of a batch's samples in the order of the epoch."""
        begin, end = self.plan.part(batch, self.replica)
        if begin == end:
            begin, _ = self.plan.part(batch, 0)
            end = begin + 1
        return range(begin, end)

    def _shuffled(self, batches: range) -> Iterator[list[int]]:
        key, samples = randomness.mix(self.seed, self.epoch), self.plan.samples
        if self.is_held:
            order = torch.randperm(samples, generator=torch.Generator().manual_seed(key))
            yield from (
                order[each.start : each.stop].tolist() for each in map(self._positions, batches)
            )
            return
        from .permutation import Permutation

        permutation = Permutation(samples, key)
        at_once = max(1, _COMPUTED_AT_ONCE // self.plan.batch_size)
        for first in range(batches.start, batches.stop, at_once):
            block = range(first, min(first + at_once, batches.stop))
            positions = [self._positions(batch) for batch in block]
            indices = iter(permutation.of(chain.from_iterable(positions)))
            yield from (list(islice(indices, len(each))) for each in positions)


class KeyedDataset(Dataset[Any]):
    """A dataset whose samples draw the same random numbers in every process and run.

    The generators are seeded from (seed, epoch, index) before a sample is loaded.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        randomness.seed_sample(randomness.mix(self.seed, epoch, index))
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


class KeyedBatchDataset(KeyedDataset):
    """The same for a dataset with ``__getitems__``: keyed by the first index of the batch."""

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        epoch, first = keys[0]
        randomness.seed_sample(randomness.mix(self.seed, epoch, first))
        return self.dataset.__getitems__([index for _, index in keys])  # type: ignore[attr-defined]


def can_be_ordered(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether a loader uses torch's default order, which the trainer may replace."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is TorchBatchSampler
        and type(loader.sampler) in (SequentialSampler, RandomSampler)
    )


def order_globally(loader: DataLoader[Any], order: GlobalOrder) -> DataLoader[Any]:
    """Copy of a loader (see :func:`can_be_ordered`) that reads its dataset in the given order."""
    dataset = loader.dataset
    if order.keyed:
        in_batches = _has_getitems(dataset)
        dataset = (KeyedBatchDataset if in_batches else KeyedDataset)(dataset, order.seed)
    return DataLoader(
        dataset,
        batch_sampler=order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        # A separate generator, so that starting workers does not draw from the model's generator.
        generator=torch.Generator().manual_seed(order.seed),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def needs_keys(loader: DataLoader[Any]) -> bool:
    """Whether loading a batch may draw random numbers; False only if it certainly does not."""
    return not (type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate)


def _has_getitems(dataset: Dataset[Any]) -> bool:
    while isinstance(dataset, Subset):  # it always has the method, and calls that of its dataset
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")
