"""Writes a process' shards into one safetensors file, straight from where the tensors lie.

torch's own writer makes the file's bytes in memory first: twice the state, on every process. What
it writes is the same; its ``HuggingFaceStorageReader`` reads both.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions that the umask gives to any other file.

    Args:
        tensors: by name, contiguous, none in the memory of another.
        path: of the file; an existing one is replaced.
        metadata: text stored in the file's header.
    """
    # safetensors itself makes files of mode 0600. To ask for the umask means to change it for a
    # moment, for all threads; a file that is made in the usual way shows it too.
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, dict(metadata or {}))
    path.chmod(mode)


class SafetensorsWriter(HuggingFaceStorageWriter):
    """A storage writer for ``torch.distributed.checkpoint.save``.

    Args:
        directory: to write into.
        rank: of this process, for the file's name.
        on_written: called on rank 0 once every process has written.
    """

    def __init__(self, directory: Path, rank: int, on_written: Callable[[], None]) -> None:
        super().__init__(str(directory), save_distributed=True)
        self._file = directory / f"rank-{rank:05d}.safetensors"
        self._on_written = on_written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process' part of the plan, and have it on the disk."""
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            if isinstance(tensor, Tensor) and item.tensor_data is not None:
                tensors[item.index.fqn] = tensor.detach().cpu().contiguous()
                offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        if tensors:
            save_tensors(
                tensors, self._file, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
            )
            descriptor = os.open(self._file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on rank 0 after the last process; there is no index to write."""
        self._on_written()
