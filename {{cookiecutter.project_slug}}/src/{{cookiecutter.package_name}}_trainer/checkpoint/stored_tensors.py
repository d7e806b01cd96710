"""Tensors in safetensors files: written with a checksum, and read on demand.

Only the local shard is read, so that loading a model never needs more memory in a process than the
strategy's shards.
"""

import contextlib
import copy
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from ..errors import CheckpointError, one_line
from . import dtensors

SHARDING = "DCP_SHARDING_INFO"
"""Offsets of shards in a file's metadata, as torch's HuggingFaceStorageReader reads them."""
_BYTES_AT_ONCE = 1 << 22
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write a safetensors file directly from tensor memory, fsync it, and return its checksum.

    An existing file is replaced; tensors may share memory. ``metadata``: text for the header, whose
    order is random: with at most one entry, equal tensors make equal files.

    Raises:
        CheckpointError: A tensor has a dtype that such files cannot hold.
        OSError: The file cannot be written.
    """
    plain = {name: each.detach().cpu().resolve_conj() for name, each in tensors.items()}
    contiguous = {name: each.resolve_neg().contiguous() for name, each in plain.items()}
    specs = {name: _spec(name, each) for name, each in contiguous.items()}
    path.touch()
    mode = path.stat().st_mode  # safetensors replaces the file by one that only this user can read
    try:
        serialize_file(specs, path, dict(metadata))
    except SafetensorError as error:
        if (found := _OS_ERROR.search(str(error))) is None:
            raise
        raise OSError(number := int(found[1]), os.strerror(number)) from None
    if path.stat().st_mode != mode:
        path.chmod(mode)
    with path.open("rb") as file, ThreadPoolExecutor(1, "fsync") as executor:
        synced = executor.submit(os.fsync, file.fileno())
        crc32 = checksum(path)
        synced.result()
    return crc32


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    try:
        return TensorSpec(
            dtype=dtype, shape=shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes
        )
    except SafetensorError:
        raise CheckpointError(
            f"{name} is a tensor of {tensor.dtype}, which safetensors files cannot hold; convert it"
        ) from None


def checksum(path: Path) -> str:
    """The CRC-32 of a file's content."""
    buffer = memoryview(bytearray(_BYTES_AT_ONCE))
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return f"{crc32:08x}"


@dataclass(frozen=True)
class _Chunk:
    """A tensor in a file, or a shard of one, and its offset in the full tensor."""

    file: Path
    offsets: list[int]
    shape: torch.Size
    dtype: torch.dtype

    def ends(self) -> list[int]:
        return [start + size for start, size in zip(self.offsets, self.shape, strict=True)]


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of safetensors files, whose values are not read yet; ``shape``: the full one."""

    path: Path
    name: str
    chunks: list[_Chunk]
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        """Read the full tensor to the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole)
        return whole

    @torch.no_grad()
    def read_into(self, target: Tensor) -> None:
        """Read into a tensor, or into the local shard of a DTensor; nothing else is read.

        Raises:
            ValueError: The shapes differ.
            CheckpointError: The files are corrupt.
        """
        if target.shape != self.shape:
            raise ValueError(
                f"{self.name} has the shape {tuple(self.shape)} in the checkpoint and "
                f"{tuple(target.shape)} here"
            )
        part, starts = dtensors.local(target.detach()), dtensors.offsets(target)
        missing = part.numel()
        with _checkpoint_errors(self.path):
            for chunk in self.chunks:
                here, there = [], []
                sizes = zip(starts, part.shape, chunk.offsets, chunk.ends(), strict=True)
                for start, length, offset, chunk_end in sizes:
                    begin, end = max(start, offset), min(start + length, chunk_end)
                    here.append(slice(begin - start, end - start))
                    there.append(slice(begin - offset, end - offset))
                if all(each.start < each.stop for each in here):
                    with safe_open(chunk.file, "pt") as opened:
                        read = opened.get_tensor(self.name)[tuple(there)]
                    part[tuple(here)].copy_(read)
                    missing -= read.numel()
            if missing:
                raise ValueError(f"{missing} elements of {self.name} are missing")


def find_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, or of all such files in a checkpoint, by name.

    Raises:
        CheckpointError: The files are corrupt.
    """
    chunks: dict[str, list[_Chunk]] = {}
    with _checkpoint_errors(path):
        for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                shards = json.loads((opened.metadata() or {}).get(SHARDING, "{}"))
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_tensor(name)  # a view of the file, which is not read yet
                    offsets = shards[name]["saved_offsets"] if name in shards else [0] * part.ndim
                    chunk = _Chunk(file, offsets, part.shape, part.dtype)
                    chunks.setdefault(name, []).append(chunk)
        return {
            name: Stored(path, name, each, _full_shape(each), each[0].dtype)
            for name, each in chunks.items()
        }


def _full_shape(chunks: Sequence[_Chunk]) -> torch.Size:
    return torch.Size(map(max, zip(*(each.ends() for each in chunks), strict=True)))


@contextlib.contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors raises many types on corrupt files
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"{path}: damaged ({reason})") from error


def read_all(tree: Any) -> Any:
    """Replace the stored tensors in a tree of dicts, lists and tuples by full tensors."""
    if isinstance(tree, Stored):
        return tree.read()
    if isinstance(tree, dict):
        result = copy.copy(tree)  # of the same class, such as Counter
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
