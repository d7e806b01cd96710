"""The position of a loader that can say it, so that a resume reads no batch again."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checkpoint.state_file import Packing, unpack
from . import randomness

T = TypeVar("T")
_HIDDEN = (
    "workers read copies of the dataset, so its state_dict is not saved, and a resume within "
    "an epoch reads the earlier batches again; use torchdata's StatefulDataLoader"
)
NEW_RANDOM = (
    "workers go on from the loader's position, but with new random numbers: keep the state of a "
    "generator in the dataset's state_dict"
)


def _is_resumable(owner: object) -> bool:
    methods = "state_dict", "load_state_dict"
    return all(callable(getattr(owner, name, None)) for name in methods)


@dataclass(frozen=True)
class Saved:
    """A position: what the loader says, and the random numbers that reading draws."""

    loader: dict[str, Any]
    random: randomness.State


def positions(loader: Any, reader: tuple[int, int]) -> "tuple[Positions | None, list[str]]":
    """The positions of a loader with a ``state_dict``, or of its dataset without workers.

    ``reader``: the replica that reads, and the number of replicas. Also returns what to print.
    """
    if _is_resumable(loader):
        return Positions(loader, reader), []
    dataset = getattr(loader, "dataset", None)
    if not _is_resumable(dataset):
        return None, []
    has_workers = bool(getattr(loader, "num_workers", 0))
    return (None, [_HIDDEN]) if has_workers else (Positions(dataset, reader), [])


class Positions:
    """Notes the positions of a loader, or dataset, after its newest batches."""

    def __init__(self, owner: Any, reader: tuple[int, int]) -> None:
        self._owner, self._reader = owner, reader
        self._noted: dict[int, tuple[dict[str, Any], randomness.Snapshot]] = {}

    def noted(
        self, batches: Iterator[T], first: int, stream: randomness.Stream, ahead: int
    ) -> Iterator[T]:
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

    def _now(self, stream: randomness.Stream) -> tuple[dict[str, Any], randomness.Snapshot]:
        return copy.deepcopy(self._owner.state_dict()), stream.position

    def state(self, batches: int, *, is_start: bool = False) -> dict[str, Tensor]:
        """The position after so many batches of the epoch as tensors; empty if it was not noted.

        ``is_start``: the next epoch is read from there.
        """
        if batches not in self._noted:
            return {}
        given, position = self._noted[batches]
        packing = Packing()
        tree = json.dumps(packing.pack(given, "loader", writes=True)).encode()
        return {
            "reader": torch.tensor([*self._reader, 0 if is_start else batches]),
            "tree": torch.frombuffer(bytearray(tree), dtype=torch.uint8),
            **{f"tensor/{name}": each for name, each in packing.tensors.items()},
            **{f"random/{name}": each for name, each in position.state().items()},
        }

    def read(self, state: Mapping[str, Tensor], batches: int) -> Saved | None:
        """Read a result of :meth:`state`; ``None`` if another replica or position saved it."""
        if state["reader"].tolist() != [*self._reader, batches]:
            return None
        tensors, random = (
            {name.removeprefix(part): state[name] for name in state if name.startswith(part)}
            for part in ("tensor/", "random/")
        )
        return Saved(unpack(json.loads(bytes(state["tree"].numpy())), tensors), random)

    def load(self, saved: Saved) -> None:
        """Set the loader to a position, before it is read."""
        self._owner.load_state_dict(copy.deepcopy(saved.loader))
