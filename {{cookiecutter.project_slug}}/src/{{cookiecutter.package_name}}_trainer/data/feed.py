"""Feeds: iterate over the batches of an epoch, with sample counts and weights for the loop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ..errors import UserError
from ..launch import collectives
from . import randomness, sampling
from .moving import is_empty
from .sampling import BatchPlan, GlobalOrder, KeyedDataset, MicroBatch, Share
from .workers import iterator

_IN_BATCHES = "__getitems__"
END = object()  # follows the last batch of an iterator


class Feed:
    """Yields the batches of an epoch, from any batch on.

    ``batches``: micro-batches per epoch; ``samples_per_step``: the effective batch size; both
    ``None`` if unknown. ``accumulate``: micro-batches per optimizer step. ``has_plan``: ``batches``
    is exact, and the same on every rank. ``is_even``: False if some replicas have a batch less than
    others. ``remarks``: what to print at the start.
    """

    batches: int | None
    samples_per_step: int | None
    accumulate: int
    has_plan: bool = False
    is_even: bool = True
    remarks: Sequence[str] = ()

    @property
    def steps(self) -> int | None:
        """Optimizer steps per epoch; ``None`` if unknown."""
        return None if self.batches is None else -(-self.batches // self.accumulate)

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """Iterate over the batches of an epoch, from number ``start`` on."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the loader and its parts: again where others read the same data."""
        raise NotImplementedError

    def state(self, batches: int, *, ends_epoch: bool) -> dict[str, Tensor]:
        """The loader's position after so many batches, or for the next epoch, if it says it."""
        return {}

    def load_state(self, state: Mapping[str, Tensor], batches: int) -> list[str]:
        """Load a result of :meth:`state`, to read from there; return notes."""
        return [note_unused(batches)]


def note_unused(batches: int) -> str:
    """What to print where a saved position of a loader cannot be used."""
    return (
        "the position of the loader was saved for another number of replicas or batches: the "
        f"first {batches} batches of the epoch are read again and skipped"
    )


class OrderedFeed(Feed):
    """Reads a copy of a ``DataLoader`` in the global order, from any batch on at no cost.

    ``repeats``: read the first epoch again and again. Batches are counted if they may differ from
    the plan: by a ``collate_fn`` or dataset that may drop samples, or a hook of the module.
    """

    has_plan = True

    def __init__(
        self, loader: DataLoader[Any], order: GlobalOrder, share: Share, repeats: bool = False
    ) -> None:
        self._source, self._order, self._repeats = loader, order, repeats
        self._share, self._planned = share, sampling.counts(loader)
        self._copied: dict[str, Any] = {}
        self._copy()
        self.plan: BatchPlan = order.plan
        self.batches, self.accumulate = order.plan.batches, order.plan.accumulate
        self.samples_per_step = order.plan.global_batch
        begin, end = order.plan.bounds(order.plan.batches - 1, order.plan.replicas - 1)
        self.is_even = order.fill or begin < end

    def _copy(self) -> None:
        """Copy the loader; again if a hook has set its ``collate_fn``, workers, … since."""
        loader, order = self._source, self._order
        now = {**vars(loader), "_iterator": None}
        if all(self._copied.get(name, self) is now[name] for name in now):
            return
        self._copied, order.keyed = now, sampling.needs_keys(loader)
        self._loader = sampling.order_globally(loader, order)
        may_drop = loader.collate_fn is not default_collate or hasattr(loader.dataset, _IN_BATCHES)
        self._counts = may_drop or bool(self._share.count_samples or self._share.count_weight)
        # Protect the model's generators unless workers draw the random numbers, or nothing does.
        isolate = loader.num_workers == 0 and order.keyed
        self._stream = randomness.Stream(order.seed) if isolate else None

    def set_epoch(self, epoch: int) -> None:
        if isinstance(dataset := self._loader.dataset, KeyedDataset):
            dataset.set_epoch(0 if self._repeats else epoch)

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        plan, order = self.plan, self._order
        order.epoch, order.start = 0 if self._repeats else epoch, start
        self._copy()
        self.set_epoch(epoch)
        for what, count in sampling.counts(self._source).items():
            sampling.check_count(what, count, self._planned[what])
        batches = drawn(iterator(self._loader), self._stream, start, len(order))
        if collectives.is_active():
            from .hashing import check_first_batch

            batches = check_first_batch(batches, order.replica, replicas=plan.replicas, tells=False)
        if self._counts:
            yield from self._counted(batches, start)
            return
        first_irregular = plan.samples_used // plan.global_batch * plan.accumulate
        for index, data in enumerate(batches, start):
            samples, weight = plan.batch_size, 1.0 / plan.accumulate
            if index >= first_irregular:
                begin, end = plan.bounds(index, order.replica)
                samples, weight = end - begin, plan.weight(index, order.replica)
            is_last = index == plan.batches - 1
            ends_step = is_last or (index + 1) % plan.accumulate == 0
            yield MicroBatch(data, index, samples, weight, ends_step, is_last, samples)

    def _counted(self, batches: Iterator[Any], start: int) -> Iterator[MicroBatch]:
        from . import samples

        plan, order, counter = self.plan, self._order, samples.Counter(self._share)
        counted = (
            counter.count(data, end - begin, is_last=index == plan.batches - 1)
            for index, data in enumerate(batches, start)
            for begin, end in [plan.bounds(index, order.replica)]
        )
        if not (order.shuffle and order.fill):  # an evaluation
            return samples.weighed(counted, 1, 1, first=start)
        ranks = collectives.world_size() if self._share.together else 1
        every = samples.endless(counted)
        return samples.weighed(every, plan.accumulate, ranks, first=start, start=start)


def drawn(
    batches: Iterator[Any], stream: randomness.Stream | None, number: int, total: int | None
) -> Iterator[Any]:
    """Yield batches from ``number`` on, which draw their random numbers from a stream, if any."""
    for batch in batches if stream is None else _in_stream(batches, stream):
        if batch is None or is_empty(batch):
            reason = "is None" if batch is None else "its tensors' first dimension is 0"
            line = f"batch {number} of the loader has no samples ({reason})"
            raise UserError(f"{line}: leave such batches out")
        yield batch
        number += 1
    if total is not None and number < total:
        advice = "its dataset raised StopIteration, or __len__ of its sampler is wrong"
        raise UserError(f"the loader ended after {number} of {total} batches: {advice}")


def _in_stream(batches: Iterator[Any], stream: randomness.Stream) -> Iterator[Any]:
    while True:
        with stream:
            batch = next(batches, END)
        if batch is END:
            return
        yield batch


def length(loader: Iterable[Any]) -> int | None:
    """Batches of a loader; ``None`` if unknown."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of an iterable-style dataset without a length
        return None
