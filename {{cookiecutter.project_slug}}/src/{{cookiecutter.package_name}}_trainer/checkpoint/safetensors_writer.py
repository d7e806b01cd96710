"""Write safetensors files directly from tensor memory, with a checksum of the content.

Format: https://github.com/huggingface/safetensors#format. With safetensors' own writer, the file
would have to be read again for its checksum, and it has mode 0600 regardless of the umask.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

SHARDING = "DCP_SHARDING_INFO"
"""Offsets of shards in a file's metadata, as torch's HuggingFaceStorageReader reads them."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Write a file and fsync it.

    Args:
        path: The file; an existing one is replaced.
        tensors: Tensors by name.
        metadata: Text for the file's header.

    Returns:
        The CRC-32 of the file's content.

    Raises:
        OSError: The file cannot be written.
    """
    # Sorted by element size, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    contents = {name: _bytes(tensors[name]) for name in names}
    header = _header(tensors, contents, metadata)
    parts: list[bytes | memoryview] = [
        len(header).to_bytes(8, "little"),
        header,
        *contents.values(),
    ]
    # In parallel with writing, which mostly waits for the disk.
    with ThreadPoolExecutor(1, "checksum") as executor, path.open("wb") as file:
        checksum = executor.submit(_checksum, parts)
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        return checksum.result()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def _header(
    tensors: Mapping[str, Tensor], contents: Mapping[str, memoryview], metadata: Mapping[str, str]
) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, content in contents.items():
        begin, end = end, end + len(content)
        entries[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8)


def _checksum(parts: Iterable[bytes | memoryview]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum
