"""Write safetensors files, with a checksum; :mod:`.stored_tensors` reads them.

One tensor at a time: saving needs no more host memory than this rank's shards and one tensor.
"""

import contextlib
import itertools
import json
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec
from torch import Tensor

from ..errors import CheckpointError
from ..launch import files

SHARDING = "DCP_SHARDING_INFO"  # in metadata: offsets of shards, as torch's reader has them
BYTES_AT_ONCE = 1 << 22
_MOST_BEHIND = 4  # times these bytes: of what is written, not summed yet


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write a safetensors file, one tensor after the other; fsync it, and return its checksum.

    An existing file is replaced; tensors may share memory. Equal tensors make equal files. A
    CheckpointError says if a tensor has a dtype that such files cannot hold.
    """
    # The largest elements first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        check(name, tensor)
        start, end = end, end + tensor.nbytes
        dtype, shape = dtype_names()[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.unlink(missing_ok=True)
    with files.synced(path) as file, ThreadPoolExecutor(1, "checksum") as executor:
        sums = deque([executor.submit(int)], _MOST_BEHIND)
        parts = (as_bytes(tensors[name]).numpy().data for name in order)
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for pieces in _batches(itertools.chain([head], parts)):
            # Waiting for each sum would be slow: on a busy machine, its thread waits for a core.
            sums.append(executor.submit(_sum, pieces, sums[-1]))
            file.writelines(pieces)
            sums[0].result()
    return f"{sums[-1].result():08x}"


def check(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError for a tensor that a safetensors file cannot hold."""
    if tensor.layout != torch.strided:
        instead = "keep its indices and values in buffers, or register it with persistent=False"
    elif tensor.dtype not in dtype_names():
        instead = "convert it"
    else:
        return
    kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
    problem = f"{name} is a tensor of {kind}, which safetensors files cannot hold"
    raise CheckpointError(f"{problem}; {instead}")


def _batches(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Pieces of large parts, or several small ones at once."""
    batch: list[memoryview] = []
    size = 0
    for buffer in parts:
        for start in range(0, len(buffer), BYTES_AT_ONCE):
            batch.append(buffer[start : start + BYTES_AT_ONCE])
            size += len(batch[-1])
            if size >= BYTES_AT_ONCE:
                yield batch
                batch, size = [], 0
    yield batch


def _sum(pieces: Sequence[memoryview], before: Future[int]) -> int:
    crc32 = before.result()
    for piece in pieces:
        crc32 = zlib.crc32(piece, crc32)
    return crc32


@cache
def dtype_names() -> dict[torch.dtype, str]:
    """The dtypes that safetensors files can hold, and their names there."""
    names: dict[torch.dtype, str] = {}
    for dtype in (value for value in vars(torch).values() if isinstance(value, torch.dtype)):
        with contextlib.suppress(SafetensorError):
            name = str(dtype).removeprefix("torch.")
            spec = TensorSpec(dtype=name, shape=[1], data_ptr=0, data_len=dtype.itemsize)
            if spec.shape == [1]:  # one element is not several, as of float4_e2m1fn_x2
                names[dtype] = spec.dtype
    return names


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)
