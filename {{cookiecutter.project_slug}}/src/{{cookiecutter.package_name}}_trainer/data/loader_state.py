"""The position of a loader that can say it, so that a resume reads no batch again."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ..checkpoint.state_file import Packing, unpack
from . import randomness

T = TypeVar("T")
_METHODS = ("state_dict", "load_state_dict")
# A batch is read one ahead to know the last one, and another one ahead to copy it to a GPU.
_KEPT = 4


class Resumable(Protocol):
    """A loader or dataset with a position: torchdata's ``StatefulDataLoader``, for example."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def find(loader: object) -> Resumable | None:
    """What says the position of a loader: the loader itself, or its dataset without workers."""
    dataset = getattr(loader, "dataset", None)
    if _is_resumable(loader):
        return cast(Resumable, loader)
    if _is_resumable(dataset) and not getattr(loader, "num_workers", 0):
        return cast(Resumable, dataset)
    return None


def is_hidden(loader: object) -> bool:
    """Whether the dataset could say its position, but workers read copies of it."""
    return find(loader) is None and _is_resumable(getattr(loader, "dataset", None))


def note_unused(batches: int) -> str:
    """What to print where a saved position cannot be used."""
    return (
        "the position of the loader was saved for another number of replicas or batches: the "
        f"first {batches} batches of the epoch are read again and skipped"
    )


def _is_resumable(owner: object) -> bool:
    return all(callable(getattr(owner, name, None)) for name in _METHODS)


@dataclass(frozen=True)
class Saved:
    """A position: what the loader says, and the random numbers that reading draws."""

    loader: dict[str, Any]
    random: randomness.State


class Positions:
    """Notes the positions of a loader after its newest batches.

    Args:
        owner: What says the position.
        reader: The replica that reads, and the number of replicas.
    """

    def __init__(self, owner: Resumable, reader: tuple[int, int]) -> None:
        self._owner, self._reader = owner, reader
        self._noted: dict[int, tuple[dict[str, Any], randomness.Snapshot]] = {}

    def noted(self, batches: Iterator[T], number: int, stream: randomness.Stream) -> Iterator[T]:
        """Yield the batches of an epoch from ``number`` on; note the position before each."""
        self._noted.clear()
        end = object()
        while True:
            self._noted.pop(number - _KEPT, None)
            self._noted[number] = copy.deepcopy(self._owner.state_dict()), stream.position
            batch = next(batches, end)
            if batch is end:
                return
            yield cast(T, batch)
            number += 1

    def state(self, batches: int, *, is_start: bool = False) -> dict[str, Tensor]:
        """The position after so many batches as tensors; empty if it was not noted.

        Args:
            batches: Number of batches of the epoch.
            is_start: The next epoch is read from there.

        Raises:
            CheckpointError: The loader's state contains an unsupported type.
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
        parts: dict[str, dict[str, Tensor]] = {"tensor": {}, "random": {}}
        for name, value in state.items():
            part, slash, rest = name.partition("/")
            if slash:
                parts[part][rest] = value
        tree = json.loads(bytes(state["tree"].numpy()))
        return Saved(unpack(tree, parts["tensor"]), parts["random"])

    def load(self, saved: Saved) -> None:
        """Set the loader to a position, before it is read."""
        self._owner.load_state_dict(copy.deepcopy(saved.loader))
