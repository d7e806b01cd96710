"""A feed that reads a loader as it is: iterable-style datasets, custom samplers."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ..errors import UserError
from ..launch import collectives
from . import epochs, loader_state, randomness
from .feed import END, Feed, drawn, iterator, length
from .first_batches import compared
from .sampling import MicroBatch, Share
from .weighing import MOST_AHEAD, Counted, Counter, endless, weighed

_RESTARTED = (
    "persistent_workers: the loader is read as it is, and its workers are started again in each "
    "epoch, so that set_epoch and random numbers reach them"
)


class ReplayFeed(Feed):
    """Reads any iterable of batches as it is: iterable-style datasets, custom samplers.

    Starting in the middle reads and skips the earlier batches, unless the loader's position is
    loaded. Random numbers drawn in this process are seeded from (seed, epoch, replica).
    The batches of a step are read ahead, and by several ranks those of a few steps: see
    :func:`~.weighing.weighed`.

    ``uneven``: for different numbers of batches on the ranks. ``"refuse"`` raises an error with the
    number of each. With ``"join"``, ranks whose loader has ended take part with weight 0, so that
    each sample still counts once. ``"allow"``: no step waits for another rank.
    ``most``: batches of this replica to read of each epoch; ``None``: all.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        share: Share,
        accumulate: int,
        uneven: str = "refuse",
        most: int | None = None,
    ) -> None:
        self._loader, self._share, self._uneven, self._most = loader, share, uneven, most
        self._tells = True
        """Whether to tell if replicas read the same samples: once."""
        self.accumulate = accumulate
        self.batches = length(loader)
        if self.batches is not None and most is not None:
            self.batches = min(self.batches, most)
        self._batch_size = batch_size = getattr(loader, "batch_size", None)
        self.samples_per_step = batch_size * share.replicas * accumulate if batch_size else None
        self._has_workers = bool(getattr(loader, "num_workers", 0))
        reader = share.replica, share.replicas
        self._positions, self.remarks = loader_state.positions(loader, reader)
        if self._has_workers and getattr(loader, "persistent_workers", False):
            self.remarks = [*self.remarks, _RESTARTED]
        self._saved: loader_state.Saved | None = None

    def set_epoch(self, epoch: int) -> None:
        epochs.set_epoch(epoch, self._loader)

    def state(self, batches: int, *, ends_epoch: bool) -> dict[str, Tensor]:
        # Workers begin each epoch with new copies of the dataset.
        continues = batches == self._most and not self._has_workers
        if self._positions is None or (ends_epoch and not continues):
            return {}
        return self._positions.state(batches, is_start=ends_epoch)

    def load_state(self, state: Mapping[str, Tensor], batches: int) -> list[str]:
        if self._positions is not None:
            self._saved = self._positions.read(state, batches)
        if self._saved is None:
            return super().load_state(state, batches)
        return [loader_state.NEW_RANDOM] if self._has_workers else []

    def epoch(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        saved, self._saved = self._saved, None
        first = 0 if saved is None else start
        return weighed(
            endless(self._counted(self._read(epoch, first, saved))),
            self.accumulate,
            1 if self._uneven == "allow" else collectives.world_size(),
            first=first,
            start=start,
            known=self.batches,
            is_refused=self._uneven == "refuse",
        )

    def _counted(self, batches: Iterator[Any]) -> Iterator[Counted]:
        """Count each batch, and see whether it is the last: read one ahead."""
        counter = Counter(self._share)
        if (following := next(batches, END)) is END:
            raise UserError(f"rank {collectives.rank()}: the loader yielded no batches")
        while following is not END:
            data, following = following, next(batches, END)
            yield counter.count(data, self._batch_size, is_last=following is END)

    def _read(self, epoch: int, first: int, saved: loader_state.Saved | None) -> Iterator[Any]:
        """The batches of an epoch from ``first`` on: 0, or that of a saved position."""
        loader, share = self._loader, self._share
        self.set_epoch(epoch)
        seed = randomness.mix(share.seed, epoch, share.replica)
        for owner in epochs.components(loader):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed)
            if getattr(owner, "persistent_workers", False) and hasattr(owner, "_iterator"):
                owner._iterator = None  # workers that go on have other random numbers, and epochs
        if saved is not None and self._positions is not None:
            self._positions.load(saved)
        stream = randomness.Stream(seed)
        with stream:
            read = iterator(loader)
        if first and saved is not None:  # not before: a new iterator draws a seed for its workers
            stream.load_state(saved.random)
        is_whole = self._most is None and isinstance(loader, DataLoader)
        is_counted = is_whole and not isinstance(getattr(loader, "dataset", None), IterableDataset)
        batches = drawn(read, stream, first, length(loader) if is_counted else None)
        if self._most is not None:
            batches = islice(batches, max(0, self._most - first))
        if self._positions is not None:
            ahead = max(MOST_AHEAD, self.accumulate)
            batches = self._positions.noted(batches, first, stream, ahead)
        tells, self._tells = self._tells, False
        return compared(batches, share.replica, replicas=share.replicas, tells=tells)
