"""Global-order sampling: the samples of a batch depend only on seed, epoch and step.

A *global batch*, the samples of one optimizer step, is split into micro-batches, and each of them
over the replicas. So the same global batch size gives the same training on any number of processes,
a step number is enough to resume, and augmentation is keyed by (seed, epoch, sample index).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from ..errors import UserError
from . import randomness

MOST_HELD = 2**20  # above it, an epoch's order is computed batch by batch instead of being held
_COMPUTED_AT_ONCE = 4096
_MOST_ITEMS = 100  # of a list or dict of components; a longer one contains samples
_DRAWING = (RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)
Key = int | tuple[int, int]


class MicroBatch(NamedTuple):
    """A batch of one replica: ``samples`` of it count; ``weight`` is a factor of its mean loss.

    ``counted``: what it counts in logged means: its samples, or what ``count_weight`` returned.
    """

    data: Any
    number: int
    samples: int
    weight: float
    ends_step: bool
    ends_epoch: bool
    counted: float


@dataclass(frozen=True)
class Share:
    """The data-parallel replica that reads, the number of replicas, and the run's seed."""

    replica: int
    replicas: int
    seed: int
    count_samples: Callable[[Any], Any] | None = None  # the module's hook, if it overrides it
    count_weight: Callable[[Any], Any] | None = None  # likewise
    together: bool = True  # False if ranks do not step together, and so exchange nothing


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch is split into batches.

    ``keeps_batches``: do not divide a smaller last micro-batch evenly, so that each replica's
    batches are some of those of one process.
    """

    samples: int  # of the dataset
    batch_size: int  # of one replica's micro-batch
    replicas: int = 1
    accumulate: int = 1  # micro-batches per optimizer step
    drop_last: bool = False  # without a last global batch that is not full
    most: int | None = None  # samples per epoch; ``None``: all
    keeps_batches: bool = False

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
        used = self.samples - (self.samples % self.global_batch if self.drop_last else 0)
        return used if self.most is None else min(used, self.most)

    @cached_property
    def batches(self) -> int:
        """Micro-batches per epoch; the same for every replica."""
        return -(-self.samples_used // self.micro_batch)

    def bounds(self, batch: int, replica: int) -> tuple[int, int]:
        """Start and end of a replica's part of a micro-batch in the epoch's order.

        In a smaller last micro-batch, the sizes of the parts differ by at most one sample. The
        first replicas have the larger parts; the last may have none.
        """
        start = batch * self.micro_batch
        size = min(self.micro_batch, self.samples_used - start)
        if self.keeps_batches:
            begin = start + min(size, replica * self.batch_size)
            return begin, min(begin + self.batch_size, start + size)
        smallest, larger = divmod(size, self.replicas)
        begin = start + replica * smallest + min(replica, larger)
        return begin, begin + smallest + (replica < larger)

    def weight(self, batch: int, replica: int) -> float:
        """Factor of a mean loss: the replicas' average, summed over a step, is the global mean."""
        first = batch - batch % self.accumulate
        in_step = min(self.global_batch, self.samples_used - first * self.micro_batch)
        begin, end = self.bounds(batch, replica)
        return (end - begin) * self.replicas / in_step


@dataclass(eq=False)
class GlobalOrder(Sampler[list[Key]]):
    """Batch sampler of one replica, in the global order.

    ``fill``: if the replica has no sample in a last batch, yield the first replica's, with weight 0
    in the plan, so that every replica takes part in every step. ``is_held``: shuffle by
    ``torch.randperm``, of which every rank holds 8 bytes per sample.
    """

    plan: BatchPlan
    replica: int
    seed: int
    shuffle: bool
    keyed: bool  # yield ``(epoch, index)`` for :class:`KeyedDataset` instead of indices
    fill: bool
    epoch: int = 0  # where the next iteration starts
    start: int = 0
    is_held: bool = True
    sampler: Sampler[int] | None = None  # of torch: draws samples in place of a permutation

    def __len__(self) -> int:
        begin, end = self.plan.bounds(self.plan.batches - 1, self.replica)
        return self.plan.batches - (begin == end and not self.fill)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, batches = self.epoch, range(self.start, len(self))
        is_drawn = self.shuffle or self.sampler is not None
        for indices in self._drawn(batches) if is_drawn else map(self._positions, batches):
            yield [(epoch, index) for index in indices] if self.keyed else list(indices)

    def _positions(self, batch: int) -> range:
        begin, end = self.plan.bounds(batch, self.replica)
        if begin == end:
            begin, end = self.plan.bounds(batch, 0)
        return range(begin, end)

    def _drawn(self, batches: range) -> Iterator[list[int]]:
        key, samples = randomness.mix(self.seed, self.epoch), self.plan.samples
        generator = torch.Generator().manual_seed(key)
        if self.sampler is not None:
            drawn = _draws(self.sampler, generator)
            check_count("sampler", len(drawn), samples)
            drawn = drawn if self.shuffle else sorted(drawn)
            yield from (drawn[span.start : span.stop] for span in map(self._positions, batches))
            return
        if self.is_held:
            order = torch.randperm(samples, generator=generator)
            for span in map(self._positions, batches):
                yield order[span.start : span.stop].tolist()
            return
        at_once = max(1, _COMPUTED_AT_ONCE // self.plan.batch_size)
        for first in range(batches.start, batches.stop, at_once):
            block = range(first, min(first + at_once, batches.stop))
            positions = [self._positions(batch) for batch in block]
            indices = iter(randomness.permuted(chain.from_iterable(positions), samples, key))
            yield from (list(islice(indices, len(position))) for position in positions)


def check_count(what: str, count: int, planned: int) -> None:
    """Raise a UserError if a dataset or sampler has other samples than steps were planned for."""
    if count != planned:
        line = f"the {what} has {count} samples, and had {planned} when steps were planned"
        raise UserError(f"{line}: keep their number, or start another fit (--trainer.weights)")


def counts(loader: DataLoader[Any]) -> dict[str, int]:
    """The numbers of a loader for which steps are planned, by what has so many samples."""
    size = cast(torch_data.BatchSampler, loader.batch_sampler).batch_size
    return {"dataset": len(cast(Any, loader.dataset)), "loader's batch": size}


def _draws(sampler: Any, generator: torch.Generator) -> list[int]:
    previous = getattr(sampler, "generator", None)
    sampler.generator = generator
    try:
        return list(sampler)
    finally:
        sampler.generator = previous


def set_epoch(epoch: int, *owners: Any) -> None:
    """Call ``set_epoch`` on loaders, datasets, samplers, ``collate_fn``, and all they contain."""
    for component in components(*owners):
        if callable(method := getattr(component, "set_epoch", None)):
            method(epoch)


def components(*owners: Any) -> Iterator[Any]:
    """Yield objects and the datasets, samplers, loaders and transforms in them, each once."""
    queue, seen = list(owners), set[int]()
    kinds = DataLoader, Dataset, Sampler, torch_data.BatchSampler
    while queue:
        component = queue.pop(0)
        if id(component) not in seen:
            seen.add(id(component))
            yield component
            for attribute in _attributes(component):
                if isinstance(attribute, kinds) or callable(getattr(attribute, "set_epoch", None)):
                    queue.append(attribute)


def _attributes(owner: Any) -> Iterator[Any]:
    for value in list(getattr(owner, "__dict__", {}).values()):
        values = value.values() if isinstance(value, Mapping) else value
        is_group = isinstance(value, Mapping | list | tuple) and len(value) <= _MOST_ITEMS
        yield from list(values) if is_group else [value]


class KeyedDataset(Dataset[Any]):
    """A dataset that seeds the generators from (seed, epoch, index) before a sample is loaded.

    A worker that lives for several epochs tells the dataset, and ``collate_fn``, when one begins.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate_fn: Any = None) -> None:
        self.dataset, self.seed, self._collate_fn, self._epoch = dataset, seed, collate_fn, -1

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        set_epoch(epoch, self.dataset, self._collate_fn)

    def _begin(self, key: tuple[int, int]) -> None:
        if key[0] != self._epoch:
            self.set_epoch(key[0])
        randomness.seed_sample(randomness.mix(self.seed, *key))

    def __getitem__(self, key: tuple[int, int]) -> Any:
        self._begin(key)
        return self.dataset[key[1]]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


class KeyedBatchDataset(KeyedDataset):
    """The same for a dataset with ``__getitems__``: keyed by the first index of the batch."""

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        self._begin(keys[0])
        return self.dataset.__getitems__([index for _, index in keys])  # type: ignore[attr-defined]


def _start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Show a worker the user's dataset, then call the user's ``worker_init_fn``."""
    info = cast(Any, torch_data.get_worker_info())
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if then is not None:
        then(worker)


def can_be_ordered(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether a loader uses samplers and iteration of torch, which the trainer may replace."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, torch_data.IterableDataset)
        and type(loader.batch_sampler) is torch_data.BatchSampler
        and type(loader.batch_sampler.sampler) in (SequentialSampler, *_DRAWING)
        and all(  # torchdata's loaders only add their position
            getattr(type(loader), name).__module__.partition(".")[0] in ("torch", "torchdata")
            for name in ("__iter__", "_get_iterator")
        )
    )


def own_draws(loader: DataLoader[Any]) -> Sampler[int] | None:
    """The sampler of a loader (see :func:`can_be_ordered`), unless it gives each sample once."""
    sampler: Any = cast(Any, loader.batch_sampler).sampler
    count = len(cast(Any, loader.dataset))
    if type(sampler) in (SequentialSampler, RandomSampler) and len(sampler.data_source) == count:
        plain = type(sampler) is SequentialSampler
        if plain or (len(sampler) == count and not sampler.replacement):
            return None
    return cast("Sampler[int]", sampler)


def order_globally(loader: DataLoader[Any], order: GlobalOrder) -> DataLoader[Any]:
    """Copy of a loader (see :func:`can_be_ordered`) that reads its dataset in the given order.

    All else is kept, the class and attributes of a subclass too.
    """
    changed: dict[str, Any] = {"batch_sampler": order, "batch_size": None, "drop_last": False}
    if order.keyed:
        kind = KeyedBatchDataset if _has_getitems(loader.dataset) else KeyedDataset
        changed["dataset"] = kind(loader.dataset, order.seed, loader.collate_fn)
        changed["worker_init_fn"] = partial(_start_worker, loader.worker_init_fn)
    # A separate generator, so that starting workers does not draw from the model's generator.
    changed["generator"] = torch.Generator().manual_seed(order.seed)
    ordered = copy.copy(loader)
    vars(ordered).update(changed, in_order=True, _iterator=None)  # torch's own setattr refuses
    return ordered


def needs_keys(loader: DataLoader[Any]) -> bool:
    """Whether loading a batch may draw random numbers; False only if it certainly does not."""
    is_plain = loader.collate_fn is torch_data.default_collate
    return not (is_plain and type(loader.dataset) is torch_data.TensorDataset)


def _has_getitems(dataset: Dataset[Any]) -> bool:
    while isinstance(dataset, torch_data.Subset):  # which always has the method, of its dataset
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")
