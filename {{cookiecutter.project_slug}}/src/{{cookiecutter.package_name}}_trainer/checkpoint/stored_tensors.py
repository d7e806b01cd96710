"""Tensors in a checkpoint, read on demand: in full, or only the local shard.

So loading a model never needs more memory in a process than the strategy's shards.
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
    """The tensors of safetensors files, by name.

    Args:
        path: A checkpoint directory, or a file.

    Raises:
        CheckpointError: Its files are corrupt.
    """

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from .safetensors_reader import SafetensorsReader

        self._path = path
        self._reader = SafetensorsReader(path)
        with self._checkpoint_errors():
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
        """Read into tensors, and into the local shards of DTensors, by name."""
        import torch.distributed.checkpoint as dcp

        with self._checkpoint_errors(), without_advice():
            dcp.load(dict(targets), storage_reader=self._reader, no_dist=True)

    @contextlib.contextmanager
    def _checkpoint_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the reader raises many types on corrupt files
            raise CheckpointError(f"{self._path}: damaged ({first_line(error)})") from error


class Stored:
    """A tensor in a checkpoint.

    Args:
        tensors: All tensors of the checkpoint.
        name: Name of this one.
        shape: Shape of the full tensor.
        dtype: The stored dtype.
    """

    def __init__(
        self, tensors: StoredTensors, name: str, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self._tensors = tensors
        self._name = name
        self.shape = shape
        self.dtype = dtype

    def read(self) -> Tensor:
        """Read the full tensor to the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self._tensors.fill({self._name: whole})
        return whole

    def read_into(self, target: Tensor) -> None:
        """Read into a tensor, or into the local shard of a DTensor; nothing else is read.

        Raises:
            ValueError: The shapes differ.
        """
        if target.shape != self.shape:
            raise ValueError(
                f"{self._name} has the shape {tuple(self.shape)} in the checkpoint and "
                f"{tuple(target.shape)} here"
            )
        self._tensors.fill({self._name: target.detach()})


def read_all(tree: Any) -> Any:
    """Replace the stored tensors in a tree of dicts and lists by full tensors."""
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
    """Fill a plain tensor or DTensor from a full tensor, or from one with the same sharding."""
    if isinstance(value, Stored):
        value.read_into(target)
    elif dtensors.is_sharded(target) and not dtensors.is_sharded(value):
        # Not through the device of the mesh: offloaded shards are on the CPU.
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
    """Silence torch's warning that it assumes a single process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
