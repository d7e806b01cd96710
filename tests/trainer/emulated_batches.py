"""Batches of every type that the trainer moves to a device, around one tensor."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class Record:
    """A batch without a method to move it."""

    x: Tensor
    name: str = "a"


class Movable:
    """A batch that moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Movable":
        """A copy there."""
        return Movable(self.x.to(device))


class Pair(NamedTuple):
    """A named tuple."""

    x: Tensor
    name: str


# How a batch is made of a tensor, and where that is found in it again.
BATCHES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda batch: batch),
    "list": (lambda x: [x, "a"], lambda batch: batch[0]),
    "tuple": (lambda x: (x, [x]), lambda batch: batch[1][0]),
    "dict": (lambda x: {"x": {"x": x}}, lambda batch: batch["x"]["x"]),
    "OrderedDict": (lambda x: OrderedDict(x=x), lambda batch: batch["x"]),
    "defaultdict": (lambda x: defaultdict(list, x=x), lambda batch: batch["x"]),
    "namedtuple": (lambda x: Pair(x, "a"), lambda batch: batch.x),
    "dataclass": (Record, lambda batch: batch.x),
    "PackedSequence": (
        lambda x: nn.utils.rnn.pack_sequence(list(x), enforce_sorted=False),
        lambda batch: batch.data,
    ),
    "movable": (Movable, lambda batch: batch.x),
}
