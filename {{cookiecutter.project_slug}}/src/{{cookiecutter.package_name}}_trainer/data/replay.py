"""A feed that reads a loader as it is: iterable-style datasets, custom samplers.

A resume reads no batch again if the loader can say its position.
"""

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ..checkpoint.state_file import from_tensors, to_tensors
from ..errors import UserError
from ..launch import collectives
from . import randomness
from .feed import END, Feed, drawn, length
from .hashing import check_first_batch
from .samples import MOST_AHEAD, Counted, Counter, endless, weighed
from .sampling import MicroBatch, Share, components, set_epoch
from .workers import iterator

_Position = tuple[dict[str, Any], randomness.Snapshot]  # what a loader says; its random numbers
_HIDDEN = (
    "workers read copies of the dataset, so its state_dict is not saved, and a resume within "
    "an epoch reads the earlier batches again; use torchdata's StatefulDataLoader"
)
_UNSAVED = (
    "the state_dict of {} is not saved: a resume iterates over the sampler from the beginning of "
    "its epoch, after set_epoch; torchdata's StatefulDataLoader saves it"
)
_NEW_RANDOM = (
    "workers go on from the loader's position, but with new random numbers: keep the state of a "
    "generator in the dataset's state_dict"
)
_NEW_DRAWS = (
    "{}.{} draws from its beginning again after a resume: seed it in set_epoch, or name a "
    "torch.Generator 'generator', which each epoch seeds"
)
_RESTARTED = (
    "persistent_workers: the loader is read as it is, and its workers are started again in each "
    "epoch, so that set_epoch and random numbers reach them"
)


def _is_resumable(owner: object) -> bool:
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))


def _new_draws(loader: Any) -> Iterator[str]:
    """A line for each generator that is neither seeded by an epoch nor saved."""
    kinds = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
    for owner in components(loader):
        for name, value in getattr(owner, "__dict__", {}).items():
            is_seeded = name == "generator" and isinstance(value, torch.Generator)
            if isinstance(value, kinds) and not (is_seeded or hasattr(type(owner), "set_epoch")):
                yield _NEW_DRAWS.format(type(owner).__name__, name)


def positions(loader: Any, reader: tuple[int, int]) -> "tuple[Positions | None, list[str]]":
    """The positions of a loader with a ``state_dict``, or of its stream without workers.

    ``reader``: the replica that reads, and the number of replicas. Also returns what to print.
    """
    if _is_resumable(loader):
        return Positions(loader, reader), []
    dataset = getattr(loader, "dataset", None)
    if isinstance(loader, DataLoader) and not isinstance(dataset, IterableDataset):
        samplers = filter(lambda component: isinstance(component, Sampler), components(loader))
        unsaved = {type(sampler).__name__: None for sampler in samplers if _is_resumable(sampler)}
        return None, [_UNSAVED.format(name) for name in unsaved]
    if not _is_resumable(dataset):
        return None, []
    has_workers = bool(getattr(loader, "num_workers", 0))
    return (None, [_HIDDEN]) if has_workers else (Positions(dataset, reader), [])


class Positions:
    """Records the state of a loader, or dataset, after its most recent batches."""

    def __init__(self, owner: Any, reader: tuple[int, int]) -> None:
        self.owner, self._reader = owner, reader
        self._noted: dict[int, _Position] = {}

    def noted(
        self, batches: Iterator[Any], first: int, stream: randomness.Stream, ahead: int
    ) -> Iterator[Any]:
        """Yield the batches of an epoch from ``first`` on; note the position before each.

        ``ahead``: how many are read before the first of them is used.
        """
        self._noted = {first: self._now(stream)}
        self.state(first)  # before the first step, if its types cannot be saved
        for number, batch in enumerate(batches, first + 1):
            yield batch
            # Another one is read ahead to know the last one, and another to copy it to a GPU.
            self._noted.pop(number - ahead - 3, None)
            self._noted[number] = self._now(stream)

    def _now(self, stream: randomness.Stream) -> _Position:
        return copy.deepcopy(self.owner.state_dict()), stream.position

    def state(self, batches: int, *, is_start: bool = False) -> dict[str, Tensor]:
        """A noted position as tensors, else nothing; ``is_start``: the next epoch begins there."""
        if batches not in self._noted:
            return {}
        state, position = self._noted[batches]
        tensors = to_tensors(state, "loader")
        return {
            "reader": torch.tensor([*self._reader, 0 if is_start else batches]),
            "tree": tensors.pop("loader"),
            **{f"tensor/{name}": tensor for name, tensor in tensors.items()},
            **{f"random/{name}": tensor for name, tensor in position.state().items()},
        }

    def read(self, state: Mapping[str, Tensor], batches: int) -> _Position | None:
        """Read a result of :meth:`state`; ``None`` if another replica or position saved it."""
        if state["reader"].tolist() != [*self._reader, batches]:
            return None
        tensors, random = (
            {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
            for prefix in ("tensor/", "random/")
        )
        said = from_tensors({**tensors, "loader": state["tree"]}, "loader")
        return said, randomness.Snapshot.of(random)


class ReplayFeed(Feed):
    """Reads any iterable of batches as it is: iterable-style datasets, custom samplers.

    Starting in the middle reads and skips the earlier batches, unless the loader's position is
    loaded. Random numbers drawn in this process are seeded from (seed, epoch, replica).

    ``uneven``: for different numbers of batches on the ranks. ``"refuse"`` raises an error with the
    number of each. With ``"join"``, ranks whose loader has ended take part with weight 0, so that
    each sample still counts once. ``"allow"``: no step waits for another rank.
    ``most``: batches of this replica to read of each epoch; ``None``: all.
    """

    def __init__(
        self, loader: Iterable[Any], share: Share, accumulate: int, uneven: str, most: int | None
    ) -> None:
        self._loader, self._share, self._uneven, self._most = loader, share, uneven, most
        self._tells = True  # whether to tell if replicas read the same samples: once
        self.accumulate = accumulate
        self.batches = length(loader)
        if self.batches is not None and most is not None:
            self.batches = min(self.batches, most)
        self._batch_size = batch_size = getattr(loader, "batch_size", None)
        self.samples_per_step = batch_size * share.replicas * accumulate if batch_size else None
        self._has_workers = bool(getattr(loader, "num_workers", 0))
        self._positions, self.remarks = positions(loader, (share.replica, share.replicas))
        if self._has_workers and getattr(loader, "persistent_workers", False):
            self.remarks = [*self.remarks, _RESTARTED]
        if self._positions is None:
            self.remarks = [*self.remarks, *_new_draws(loader)]
        self._saved: _Position | None = None

    def set_epoch(self, epoch: int) -> None:
        set_epoch(epoch, self._loader)

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
        return [_NEW_RANDOM] if self._has_workers else []

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

    def _read(self, epoch: int, first: int, saved: _Position | None) -> Iterator[Any]:
        """The batches of an epoch from ``first`` on: 0, or that of a saved position."""
        loader, share = self._loader, self._share
        self.set_epoch(epoch)
        seed = randomness.mix(share.seed, epoch, share.replica)
        for owner in components(loader):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed)
            if getattr(owner, "persistent_workers", False) and hasattr(owner, "_iterator"):
                owner._iterator = None  # workers that go on have other random numbers, and epochs
        if saved is not None and self._positions is not None:
            self._positions.owner.load_state_dict(saved[0])
        stream = randomness.Stream(seed)
        with stream:
            read = iterator(loader)
        if first and saved is not None:  # not before: a new iterator draws a seed for its workers
            stream.position = saved[1]
        is_whole = self._most is None and isinstance(loader, DataLoader)
        is_counted = is_whole and not isinstance(getattr(loader, "dataset", None), IterableDataset)
        batches = drawn(read, stream, first, length(loader) if is_counted else None)
        if self._most is not None:
            batches = islice(batches, max(0, self._most - first))
        if self._positions is not None:
            ahead = max(MOST_AHEAD, self.accumulate)
            batches = self._positions.noted(batches, first, stream, ahead)
        tells, self._tells = self._tells, False
        return check_first_batch(batches, share.replica, replicas=share.replicas, tells=tells)
