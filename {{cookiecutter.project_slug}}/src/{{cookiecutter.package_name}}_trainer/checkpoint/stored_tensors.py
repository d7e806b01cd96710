"""Tensors in safetensors files, read on demand: one at a time, and of each this rank's shard.

So loading needs no more host memory than these shards and one tensor.
"""

import contextlib
import gc
import json
import math
import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import one_line, unreadable
from . import dtensors
from .tensor_files import BYTES_AT_ONCE, SHARDING, dtype_names


def checksum(path: Path) -> str:
    """The CRC-32 of a file's content."""
    buffer, crc32 = memoryview(bytearray(BYTES_AT_ONCE)), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return f"{crc32:08x}"


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A tensor in a file, or a shard of one; ``start``: of its bytes in the file."""

    content: Callable[[], mmap.mmap]  # maps the file when the first tensor is read, once for all
    start: int
    offsets: list[int]
    shape: torch.Size
    dtype: torch.dtype

    def ends(self) -> list[int]:
        return [start + size for start, size in zip(self.offsets, self.shape, strict=True)]

    @contextlib.contextmanager
    def view(self) -> Iterator[Tensor]:
        """Its elements, which are read when they are used, and in memory until the context ends."""
        content, count = self.content(), self.shape.numel()
        flat = torch.frombuffer(content, dtype=self.dtype, count=count, offset=self.start)
        yield flat.view(self.shape)
        page = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        content.madvise(mmap.MADV_DONTNEED, page, self.start + flat.nbytes - page)


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """A tensor of safetensors files, whose values are not read yet; ``shape``: the full one.

    torch takes it for a tensor, so that ``load_state_dict`` reads one at a time.
    """

    path: Path
    name: str
    chunks: list[_Chunk]
    shape: torch.Size
    dtype: torch.dtype

    def read(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    @torch.no_grad()
    def read_into(self, target: Tensor) -> None:
        """Read into a tensor, or into the local shard of a DTensor; nothing else is read."""
        if target.shape != self.shape:
            shapes = f"{tuple(self.shape)} in the checkpoint and {tuple(target.shape)} here"
            raise ValueError(f"{self.name} has the shape {shapes}")
        self._read(dtensors.local(target.detach()), dtensors.offsets(target))

    def read_flat(self, start: int, length: int) -> Tensor:
        """Read elements of the flattened tensor to the CPU, with at most the rest of their rows."""
        if not self.shape:
            return self.read().view(1).narrow(0, start, length)
        row = max(math.prod(self.shape[1:]), 1)
        first, end = start // row, -(-(start + length) // row)
        rows = torch.empty((end - first, *self.shape[1:]), dtype=self.dtype)
        self._read(rows, [first, *[0] * (rows.ndim - 1)])
        return rows.view(-1).narrow(0, start - first * row, length)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.copy_ and isinstance(args[1], cls):
            args[1].read_into(args[0])
            return args[0]
        return func(*read_all(args), **read_all(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """What hooks of ``load_state_dict`` ask of tensors, which is read for it."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

    def _read(self, tensor: Tensor, starts: Sequence[int]) -> None:
        """Read into a tensor the elements that it has from an offset in each dimension on."""
        missing = tensor.numel()
        with _checkpoint_errors(self.path):
            for chunk in self.chunks:
                here, there = [], []
                sizes = zip(starts, tensor.shape, chunk.offsets, chunk.ends(), strict=True)
                for start, length, offset, chunk_end in sizes:
                    begin, end = max(start, offset), min(start + length, chunk_end)
                    here.append(slice(begin - start, end - start))
                    there.append(slice(begin - offset, end - offset))
                if all(piece.start < piece.stop for piece in here):
                    target = tensor[tuple(here)]
                    with chunk.view() as elements:
                        target.copy_(elements[tuple(there)])
                    missing -= target.numel()
            if missing:
                raise ValueError(f"{missing} elements of {self.name} are missing")


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause garbage collection: a table of 40,000 tensors would take four times as long to read."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def find_tensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, or of all such files in a checkpoint, by name."""
    chunks: dict[str, list[_Chunk]] = {}
    dtypes = {name: dtype for dtype, name in dtype_names().items()}
    with _checkpoint_errors(path):
        for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt"), file.open("rb") as opened:  # the one checks the header
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            content = cache(partial(_mapped, file))
            shards = json.loads(header.pop("__metadata__", {}).get(SHARDING, "{}"))
            for name, entry in header.items():
                shape, start = torch.Size(entry["shape"]), 8 + length + entry["data_offsets"][0]
                offsets = shards[name]["saved_offsets"] if name in shards else [0] * len(shape)
                chunk = _Chunk(content, start, offsets, shape, dtypes[entry["dtype"]])
                chunks.setdefault(name, []).append(chunk)
        tensors = {}
        for name, saved in chunks.items():
            ends = zip(*(chunk.ends() for chunk in saved), strict=True)  # of each dimension
            tensors[name] = Stored(path, name, saved, torch.Size(map(max, ends)), saved[0].dtype)
        return tensors


@contextlib.contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors raises many types on corrupt files
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise unreadable(f"{path}: damaged ({reason})", error) from error


def read_all(tree: Any) -> Any:
    """Replace the stored tensors in a tree of dicts, lists and tuples by full tensors."""
    return tree_map_only(Stored, Stored.read, tree)


def fill_module(module: nn.Module, saved: Mapping[str, Any], strict: bool = True) -> None:
    """``module.load_state_dict`` that reads one tensor at a time, and of a DTensor its shard."""
    named = (module.named_parameters, module.named_buffers)
    names = {name for method in named for name, _ in method(remove_duplicate=False)}
    here, state = module.state_dict(keep_vars=True), dict(saved)
    for name in state.keys() - names:  # for example of torchmetrics, which keeps what it is given
        state[name] = read_all(state[name])
        if isinstance(here.get(name), Tensor):
            state[name] = state[name].to(here[name].device)
    for name in [name for name, value in state.items() if isinstance(value, str) and name in names]:
        state[name] = here[name]  # left out: that of the code
    module.load_state_dict(state, strict)


@torch.no_grad()
def fill(target: Tensor, value: Tensor | Stored) -> None:
    """Fill a plain tensor or DTensor from a full tensor, or from one with the same sharding."""
    if isinstance(value, Stored):
        value.read_into(target)
    elif dtensors.is_sharded(target) and not dtensors.is_sharded(value):
        local = dtensors.local(target)  # not by the mesh's device: offloaded shards are on the CPU
        sizes = zip(dtensors.offsets(target), local.shape, strict=True)
        local.copy_(value[tuple(slice(start, start + length) for start, length in sizes)])
    else:
        target.copy_(value)
