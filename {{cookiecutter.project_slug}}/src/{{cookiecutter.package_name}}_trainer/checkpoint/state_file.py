"""``state.json`` of a checkpoint: everything except tensors, as JSON with a checksum.

The file is ``{"crc32": "…", "content":`` on its own line, then the content that the checksum
covers, then ``}``. It is valid JSON, and a change of any byte is detected.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..launch import collectives
from ..options.values import plain_number
from . import dtensors

FILE = "state.json"
FORMAT = 2
MOST_STEPS = 10**15  # larger than in any real run; a larger number means corruption
_MOST_RANKS = 10**7
_FRAME = re.compile(rb'\{"crc32": "([0-9a-f]{8})", "content":\n(.*)\n\}\n', re.DOTALL)


class ShardedDict(dict[str, Any]):
    """A dict whose entries are sharded over the ranks; a checkpoint contains all of them."""


class StoredFile(NamedTuple):
    """A safetensors file of a checkpoint: its size in bytes and the CRC-32 of its content."""

    size: int
    crc32: str


class Head(NamedTuple):
    """Header of a checkpoint: the step, the number of ranks, and its files by name."""

    step: int
    world_size: int
    files: dict[str, StoredFile]


def encode(head: Head, tree: str) -> bytes:
    """The content of the file, with a value of :meth:`Packing.pack` as JSON."""
    fields = {"format": FORMAT, **head._asdict()}
    content = f'{{"head": {json.dumps(fields)}, "state": {tree}}}'.encode()
    return b'{"crc32": "%08x", "content":\n%s\n}\n' % (zlib.crc32(content), content)


def decode(data: bytes) -> tuple[Head, Any]:
    """Parse the file: return the header, and the tree for :func:`unpack`.

    A ValueError says if it is corrupt, or was written by another version of the trainer.
    """
    frame = _FRAME.fullmatch(data)
    if frame is None:
        raise ValueError("it is not a checkpoint's state")
    if int(frame[1], 16) != zlib.crc32(frame[2]):
        raise ValueError("its content has changed since it was saved")
    try:
        content = json.loads(frame[2])
        head, tree = content["head"], content["state"]
        if head["format"] != FORMAT:
            raise ValueError(f"written in format {head['format']}; this trainer reads {FORMAT}")
        files = {str(name): StoredFile(*entry) for name, entry in head["files"].items()}
        parsed = Head(head["step"], head["world_size"], files)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    check_count("step", parsed.step, 0, MOST_STEPS)
    check_count("world_size", parsed.world_size, 1, _MOST_RANKS)
    for name, file in files.items():
        check_count(f"size of {name}", file.size, 0, 2**63)
        if not isinstance(file.crc32, str):
            raise ValueError(f"checksum of {name} is {file.crc32!r}")
    return parsed, tree


def check_count(name: str, value: object, least: int, most: int) -> int:
    """Return a value from a checkpoint, or raise ValueError unless it is an integer in bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.40}, not a whole number from {least} to {most}")
    return value


class Packing:
    """Converts a state to JSON, and collects the tensors that this rank writes.

    A replicated tensor is written by rank 0, an entry of a :class:`ShardedDict` by the lowest rank
    that has it, and a DTensor by the ranks whose shards are not replicas of another rank's.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: set[str] = set()

    def pack(self, value: Any, path: str, writes: bool) -> Any:
        """Convert a tree of dicts, lists, tuples, numbers, strings, tensors and dtypes to JSON.

        ``path``: of the tree, for the names of its tensors, and for the CheckpointError if it
        contains another type. ``writes``: whether this rank writes its replicated tensors.
        """
        if isinstance(value, Tensor):
            return {"~tensor": self._note(value, path, writes)}
        value = plain_number(value)
        if value is None or isinstance(value, bool | str) or type(value) in (int, float):
            return value
        if isinstance(value, torch.dtype):
            return {"~dtype": str(value).removeprefix("torch.")}
        if isinstance(value, ShardedDict):
            return self._pack_sharded(value, path)
        if isinstance(value, Mapping):
            return self._pack_mapping(value, path, writes)
        if isinstance(value, list | tuple):
            items = [self.pack(item, f"{path}/{index}", writes) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"~tuple": items}
        supported = "a checkpoint supports numbers, text and tensors in dicts, lists and tuples"
        advice = f"{supported}; leave it out of the state_dict"
        raise CheckpointError(f"{path} is a {type(value).__name__}; {advice}")

    def _note(self, tensor: Tensor, path: str, writes: bool) -> str:
        name = path
        while name in self._names:  # for example, for the keys 1 and "1"
            name += "~"
        self._names.add(name)
        if dtensors.is_first_copy(tensor) if dtensors.is_sharded(tensor) else writes:
            self.tensors[name] = tensor
        return name

    def _pack_mapping(self, value: Mapping[Any, Any], path: str, writes: bool) -> Any:
        kind = "~counter" if isinstance(value, Counter) else "~dict"
        if kind == "~dict" and all(isinstance(key, str) and key[:1] != "~" for key in value):
            return {key: self.pack(item, f"{path}/{key}", writes) for key, item in value.items()}
        pairs = [(plain_number(key), item) for key, item in value.items()]
        for key, _ in pairs:
            if key is not None and type(key) not in (bool, int, float, str):
                problem = f"a {type(key).__name__} as a key"
                raise CheckpointError(f"{path} has {problem}; give a number or text")
        return {kind: [[key, self.pack(item, f"{path}/{key}", writes)] for key, item in pairs]}

    def _pack_sharded(self, value: ShardedDict, path: str) -> Any:
        keys = collectives.gather(list(value))
        earlier = {key for rank_keys in keys[: collectives.rank()] for key in rank_keys}
        packed = {key: self.pack(value[key], f"{path}/{key}", key not in earlier) for key in value}
        merged: dict[str, Any] = {}
        for entries in collectives.gather(packed):
            merged |= entries | merged  # the lowest rank's
        return merged


def to_tensors(state: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """A rank-local state as tensors, whose names begin with ``name``."""
    packing = Packing()
    tree = json.dumps(packing.pack(state, name, writes=True)).encode()
    return {**packing.tensors, name: torch.frombuffer(bytearray(tree), dtype=torch.uint8)}


def from_tensors(tensors: Mapping[str, Tensor], name: str) -> Any:
    """The state from which :func:`to_tensors` made tensors."""
    return unpack(json.loads(bytes(tensors[name].tolist())), tensors)


def unpack(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Restore the value from which :meth:`Packing.pack` made a tree, with tensors by name."""
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "~tensor" in tree:
        return tensors[tree["~tensor"]]
    if "~dtype" in tree:
        if isinstance(dtype := getattr(torch, str(tree["~dtype"]), None), torch.dtype):
            return dtype
        raise ValueError(f"{tree['~dtype']!r:.40} is not a data type of torch")
    if "~tuple" in tree:
        return tuple(unpack(item, tensors) for item in tree["~tuple"])
    is_counter = "~counter" in tree
    pairs = tree["~counter"] if is_counter else tree.get("~dict", tree.items())
    restored = {key: unpack(item, tensors) for key, item in pairs}
    return Counter(restored) if is_counter else restored
