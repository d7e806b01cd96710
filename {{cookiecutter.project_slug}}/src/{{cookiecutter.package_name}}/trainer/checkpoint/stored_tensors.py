"""Tensors that lie in a checkpoint, read when they are wanted: whole, or the part that lies here.

So no process holds more of a model than its strategy has it hold, while it loads one.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from . import dtensors


class StoredTensors(Mapping[str, "Stored"]):
    """The tensors of a checkpoint's safetensors files, by name.

    Args:
        path: the checkpoint's directory.

    Raises:
        CheckpointError: its files are damaged.
    """

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from .safetensors_reader import SafetensorsReader

        self._path = path
        self._reader = SafetensorsReader(path)
        with self._complaining():
            entries = self._reader.read_metadata().state_dict_metadata
        self._entries = {
            key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> "Stored":
        entry = self._entries[name]
        return Stored(self, name, entry.size, entry.properties.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read into tensors, and into what lies here of DTensors, by name."""
        import torch.distributed.checkpoint as dcp

        with self._complaining(), without_advice():
            dcp.load(dict(targets), storage_reader=self._reader, no_dist=True)

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a damaged file makes its reader raise
            raise CheckpointError(f"{self._path}: damaged ({first_line(error)})") from error


class Stored:
    """A tensor in a checkpoint.

    Args:
        tensors: of the checkpoint.
        name: its own among them.
        shape: of the whole tensor.
        dtype: it is stored in.
    """

    def __init__(
        self, tensors: StoredTensors, name: str, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self._tensors = tensors
        self._name = name
        self.shape = shape
        self.dtype = dtype

    def read(self) -> Tensor:
        """The whole tensor, on the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self._tensors.fill({self._name: whole})
        return whole

    def read_into(self, target: Tensor) -> None:
        """Fill a tensor, or what lies here of a DTensor, and read no more than that.

        Raises:
            ValueError: they differ in shape.
        """
        if target.shape != self.shape:
            raise ValueError(
                f"{self._name} has the shape {tuple(self.shape)} in the checkpoint and "
                f"{tuple(target.shape)} here"
            )
        self._tensors.fill({self._name: target.detach()})


def read_all(tree: Any) -> Any:
    """A tree of dicts and lists whose stored tensors are read, whole; tensors stay as they are."""
    if isinstance(tree, Stored):
        return tree.read()
    if isinstance(tree, dict):
        result = copy.copy(tree)
        for key, value in tree.items():
            result[key] = read_all(value)
        return result
    if isinstance(tree, list | tuple):
        return type(tree)(read_all(value) for value in tree)
    return tree


@torch.no_grad()
def fill(target: Tensor, value: Tensor | Stored) -> None:
    """Fill a tensor, whole or in parts, from a whole one or from one in the same parts."""
    if isinstance(value, Stored):
        value.read_into(target)
    elif dtensors.is_sharded(target) and not dtensors.is_sharded(value):
        # Not by way of the mesh's device, where parts that are offloaded do not lie.
        part = dtensors.local(target)
        for dim, (start, length) in enumerate(
            zip(dtensors.offsets(target), part.shape, strict=True)
        ):
            value = value.narrow(dim, start, length)
        part.copy_(value)
    else:
        target.copy_(value)


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silence torch's remark that a single process is assumed: it is what we mean."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def first_line(error: BaseException) -> str:
    """An error's type and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
