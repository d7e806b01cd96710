"""Tensors in a checkpoint, read on demand: in full, or only the local shard.

So loading a model never needs more memory in a process than the strategy's shards.
"""

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import CheckpointError
from . import dtensors
from .safetensors_writer import DTYPES, SHARDING

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class _Chunk:
    """A tensor in a file, or a shard of one, and its offset in the full tensor."""

    path: Path
    offsets: list[int]
    shape: list[int]
    dtype: torch.dtype


class StoredTensors(Mapping[str, "Stored"]):
    """The tensors of safetensors files, by name.

    Args:
        path: A checkpoint directory, or a file.

    Raises:
        CheckpointError: Its files are corrupt.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chunks: dict[str, list[_Chunk]] = {}
        with self._checkpoint_errors():
            for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
                self._add(file)

    def _add(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            shards = json.loads((file.metadata() or {}).get(SHARDING, "{}"))
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                shape, dtype = part.get_shape(), _DTYPES[part.get_dtype()]
                offsets = shards[name]["saved_offsets"] if name in shards else [0] * len(shape)
                self._chunks.setdefault(name, []).append(_Chunk(path, offsets, shape, dtype))

    def __getitem__(self, name: str) -> "Stored":
        chunks = self._chunks[name]
        with self._checkpoint_errors():
            ends = [torch.tensor(each.offsets) + torch.tensor(each.shape) for each in chunks]
            shape = torch.Size(torch.stack(ends).amax(0).int().tolist())
        return Stored(self, name, shape, chunks[0].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    @torch.no_grad()
    def fill(self, name: str, target: Tensor) -> None:
        """Read a tensor into another, or into the local shard of a DTensor."""
        part, starts = dtensors.local(target), dtensors.offsets(target)
        missing = part.numel()
        with self._checkpoint_errors():
            for chunk in self._chunks[name]:
                here, there = [], []
                sizes = zip(starts, part.shape, chunk.offsets, chunk.shape, strict=True)
                for start, length, offset, size in sizes:
                    begin, end = max(start, offset), min(start + length, offset + size)
                    here.append(slice(begin - start, end - start))
                    there.append(slice(begin - offset, end - offset))
                if all(each.start < each.stop for each in here):
                    with safe_open(chunk.path, "pt") as file:
                        # A view of the file, of which only what is copied is read.
                        read = file.get_tensor(name)[tuple(there)]
                    part[tuple(here)].copy_(read)
                    missing -= read.numel()
            if missing:
                raise ValueError(f"{missing} elements of {name} are missing")

    @contextlib.contextmanager
    def _checkpoint_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # safetensors raises many types on corrupt files
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
        self._tensors, self._name = tensors, name
        self.shape, self.dtype = shape, dtype

    def read(self) -> Tensor:
        """Read the full tensor to the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self._tensors.fill(self._name, whole)
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
        self._tensors.fill(self._name, target.detach())


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


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
