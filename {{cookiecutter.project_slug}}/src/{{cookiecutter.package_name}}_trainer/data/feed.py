"""Feeds: iterate over the batches of an epoch, with sample counts and weights for the loop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import UserError
from ..launch import collectives
from . import loader_state, randomness
from .batch_limit import ALL, BatchLimit
from .first_batches import compared
from .iteration import counted, read
from .samples import batch_length
from .sampling import BatchPlan, GlobalOrder

"""How to handle loaders that yield different numbers of training batches on different ranks.

``"refuse"`` raises an error with the number of each rank. With ``"join"``, ranks whose loader has
ended take part with weight 0, so that each sample still counts once.
"""


_HIDDEN = (
    "workers read copies of the dataset, so its state_dict is not saved, and a resume within "
    "an epoch reads the earlier batches again; use torchdata's StatefulDataLoader"
)

_NEW_RANDOM = (
    "workers go on from the loader's position, but with new random numbers: keep the state of a "
    "generator in the dataset's state_dict"
)


class MicroBatch(NamedTuple):
    """A batch of one replica.

    ``samples``: number of samples that count; ``weight``: factor of the replica's mean loss.
    """

    data: Any
    number: int
    samples: int
    weight: float
    ends_step: bool
    ends_epoch: bool


class Feed(Protocol):
    """Yields the batches of an epoch, from any batch on."""

    batches: int | None
    """Micro-batches per epoch; ``None`` if unknown."""
    samples_per_step: int | None
    """The effective batch size; ``None`` if unknown."""
    accumulate: int
    """Micro-batches per optimizer step."""
    has_plan: bool = False
    """Whether ``batches`` is exact, and the same on every rank."""
    remarks: Sequence[str] = ()
    """What to print at the start."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps per epoch; ``None`` if unknown."""
        return None if self.batches is None else -(-self.batches // self.accumulate)

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """Iterate over the batches of an epoch, from number ``start`` on."""
        ...

    def state(self, batches: int, *, ends_epoch: bool) -> dict[str, Tensor]:
        """The loader's position after so many batches of an epoch, if it says it.

        At the end of an epoch: that from which the next one is read, unless it is the first one.
        """
        return {}

    def load_state(self, state: Mapping[str, Tensor], batches: int) -> list[str]:
        """Load a position to read from; return notes.

        Args:
            state: Result of :meth:`state`.
            batches: Number of batches of the epoch before this position.
        """
        return [loader_state.note_unused(batches)]


@dataclass(frozen=True)
class Share:
    """The data-parallel replica that reads, the number of replicas, and the run's seed."""

    replica: int
    replicas: int
    seed: int


class OrderedFeed(Feed):
    """Reads a loader in the global order; starting in the middle of an epoch is free.

    Args:
        loader: A ``DataLoader`` whose batch sampler is ``order``.
        order: The order of the samples.
        seed: Seed of the run.
        repeats: Read the first epoch again and again.
    """

    def __init__(
        self, loader: DataLoader[Any], order: GlobalOrder, seed: int, repeats: bool = False
    ) -> None:
        self._loader = loader
        self._order = order
        self._repeats = repeats
        self.plan: BatchPlan = order.plan
        # Protect the model's generators unless workers draw the random numbers, or nothing does.
        isolate = loader.num_workers == 0 and order.keyed
        self._stream = randomness.Stream(seed) if isolate else None
        self.batches: int | None = order.plan.batches
        self.samples_per_step: int | None = order.plan.global_batch
        self.accumulate = order.plan.accumulate
        self.has_plan = True

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        plan, replica = self.plan, self._order.replica
        last, accumulate = plan.batches - 1, plan.accumulate
        first_irregular = plan.samples_used // plan.global_batch * accumulate
        self._order.set_position(0 if self._repeats else epoch, start)
        batches = compared(read(self._loader), replica, replicas=plan.replicas, tells=False)
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
    """Reads any iterable as it is.

    For iterable-style datasets and custom samplers. Starting in the middle reads and skips the
    earlier batches, unless the loader's position is loaded.

    Args:
        loader: A ``DataLoader`` or another iterable of batches.
        share: The replica. Random numbers that the loader draws in this process are seeded from
            (seed, epoch, replica).
        accumulate: Micro-batches per optimizer step.
        uneven: ``"refuse"``, ``"join"``; or ``"allow"``, if no step waits for another rank.
        limit: Batches of this replica to read of each epoch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        share: Share,
        accumulate: int,
        uneven: str = "refuse",
        limit: BatchLimit = ALL,
    ) -> None:
        self._loader = loader
        self._replica, self._replicas = share.replica, share.replicas
        self._seed = share.seed
        self._uneven = uneven
        self._tells = True
        """Whether to tell if replicas read the same samples: once."""
        self.accumulate = accumulate
        self.batches = _length(loader)
        self._most = limit.of_loader(self.batches, accumulate)
        if self.batches is not None and self._most is not None:
            self.batches = min(self.batches, self._most)
        self._batch_size = batch_size = getattr(loader, "batch_size", None)
        self.samples_per_step = batch_size * share.replicas * accumulate if batch_size else None
        owner = loader_state.find(loader)
        reader = (share.replica, share.replicas)
        self._positions = loader_state.Positions(owner, reader) if owner is not None else None
        self._saved: loader_state.Saved | None = None
        if loader_state.is_hidden(loader):
            self.remarks = [_HIDDEN]

    def state(self, batches: int, *, ends_epoch: bool) -> dict[str, Tensor]:
        if self._positions is None:
            return {}
        if not ends_epoch:
            return self._positions.state(batches)
        # Workers begin each epoch with new copies of the dataset.
        goes_on = batches == self._most and not getattr(self._loader, "num_workers", 0)
        return self._positions.state(batches, is_start=True) if goes_on else {}

    def load_state(self, state: Mapping[str, Tensor], batches: int) -> list[str]:
        if self._positions is not None:
            self._saved = self._positions.read(state, batches)
        if self._saved is None:
            return [loader_state.note_unused(batches)]
        return [_NEW_RANDOM] if getattr(self._loader, "num_workers", 0) else []

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        saved, self._saved = self._saved, None
        first = 0 if saved is None else start
        for index, (data, samples, weight, ends_epoch) in enumerate(
            self._weighted(self._read(epoch, first, saved), first), first
        ):
            if index >= start:
                ends_step = ends_epoch or (index + 1) % self.accumulate == 0
                yield MicroBatch(
                    data, index, samples, weight / self.accumulate, ends_step, ends_epoch
                )

    def _weighted(self, read: Iterator[Any], count: int) -> Iterator[tuple[Any, int, float, bool]]:
        """Yield each batch, its samples that count, its weight, and whether it is the last."""
        batches = _with_last(read)
        data, is_last = next(batches, (None, True))
        if data is None:
            raise UserError(f"rank {collectives.rank()}: the loader yielded no batches")
        samples, has_ended = batch_length(data, self._batch_size), False
        while not has_ended:
            count += 1
            weight, has_ended = 1.0, is_last
            if self._uneven != "allow":
                infos = _exchange(samples, is_last, self.batches)
                if self._uneven == "refuse":
                    _refuse_uneven(infos, count)
                weight = samples * len(infos) / max(1, sum(each.samples for each in infos))
                has_ended = all(each.is_last for each in infos)
            yield data, samples, weight, has_ended
            if not is_last:
                data, is_last = next(batches)
                samples = batch_length(data, self._batch_size)
            else:
                # A replica whose loader has ended repeats its last batch, with weight 0.
                samples = 0

    def _read(self, epoch: int, first: int, saved: loader_state.Saved | None) -> Iterator[Any]:
        for part in ("sampler", "batch_sampler", "dataset"):
            if hasattr(getattr(self._loader, part, None), "set_epoch"):
                getattr(self._loader, part).set_epoch(epoch)
        stream = randomness.Stream(randomness.mix(self._seed, epoch, self._replica))
        for owner in (self._loader, getattr(self._loader, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(randomness.mix(self._seed, epoch, self._replica))
        if saved is not None and self._positions is not None:
            self._positions.load(saved)
        with stream:
            batches = compared(
                read(self._loader), self._replica, replicas=self._replicas, tells=self._tells
            )
            self._tells = False
        if first and saved is not None:  # not before: a new iterator draws a seed for its workers
            stream.load_state(saved.random)
        most = None if self._most is None else max(0, self._most - first)
        batches = islice(_isolated(batches, stream), most)
        if self._positions is not None:
            return self._positions.noted(batches, first, stream)
        return batches if most is not None else counted(batches, self._loader)


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


class _BatchInfo(NamedTuple):
    """What replicas exchange about a batch; ``batches``: of the epoch, -1 if unknown."""

    samples: int
    is_last: bool
    batches: int


def _exchange(samples: int, is_last: bool, batches: int | None) -> list[_BatchInfo]:
    rows = torch.zeros(collectives.world_size(), 3, dtype=torch.int64)
    own = [samples, int(is_last), -1 if batches is None else batches]
    rows[collectives.rank()] = torch.tensor(own)
    infos = collectives.all_reduce(rows).tolist()
    return [_BatchInfo(samples, bool(is_last), batches) for samples, is_last, batches in infos]


def _refuse_uneven(infos: list[_BatchInfo], count: int) -> None:
    if len({each.is_last for each in infos}) == 1:
        return
    known = (
        f"rank {rank} has {count if each.is_last else _at_least(each.batches, count)}"
        for rank, each in enumerate(infos)
    )
    raise UserError(
        f"the ranks' loaders give different numbers of batches: {', '.join(known)}; give each the "
        "same number, or set uneven_inputs='join'"
    )


def _at_least(batches: int, count: int) -> str:
    return str(batches) if batches > count else f"more than {count}"


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of an iterable-style dataset without a length
        return None
