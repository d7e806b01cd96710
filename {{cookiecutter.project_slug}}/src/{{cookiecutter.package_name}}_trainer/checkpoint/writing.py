"""Write checkpoints: one directory per step, written under a temporary name and then renamed."""

import datetime
import errno
import itertools
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CheckpointError, DiskError, TemporaryError, one_line
from ..launch import collectives, files
from . import dtensors, run_directory, state_file, tensor_files
from .run_directory import DIRECTORY, PREFIX, before, complete, step_name, step_of
from .run_lock import RunLock
from .state_file import Head, Packing, StoredFile

_ALIGNMENT = 16  # of a tensor's bytes, for every dtype


class _Chunk(NamedTuple):
    """A tensor, or this rank's shard of one, and its offset in the full tensor."""

    local: Tensor
    offsets: list[int]


class Checkpoints:
    """Writes the checkpoints of a run and keeps the newest, to which it links as ``last``.

    ``keep``: at least two, so that one is always complete. ``asynchronous``: copy the state, into
    memory that the next save reuses, and write it while training continues. ``lock``: of the run.
    """

    def __init__(
        self, folder: Path, keep: int = 2, asynchronous: bool = False, lock: RunLock | None = None
    ) -> None:
        self._directory, self._lock, self._keep = folder, lock or RunLock(), max(keep, 2)
        self._executor = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)  # of copies; pinned if one is of a GPU
        self._is_pinned = False
        self._group: dist.ProcessGroup | None = None
        if asynchronous and collectives.is_active():
            # A separate group: the writer's collectives must not mix with those of the step.
            timeout = datetime.timedelta(seconds=collectives.timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        folder.parent.mkdir(parents=True, exist_ok=True)  # so that a save finds its removal
        if collectives.rank() == 0:  # now, not in a save, in which another rank may write already
            for path in (*folder.glob(f".{PREFIX}*"), *folder.parent.glob(files.TEMPORARY)):
                _discard(path)  # of an attempt that was killed

    def save(self, step: int, state: Mapping[str, Any], local: Mapping[str, Tensor]) -> None:
        """Save the state after so many optimizer steps; called by every rank.

        ``state`` is the same on every rank: numbers, strings and tensors in dicts and lists;
        ``local``: rank-local tensors. Every rank raises CheckpointError if it cannot be written.
        """
        self.wait()
        packing = Packing()
        tree = json.dumps(packing.pack(dict(state), "state", collectives.rank() == 0))
        tensors = packing.tensors
        tensors |= {f"ranks/{collectives.rank()}/{key}": value for key, value in local.items()}
        chunks = {
            name: _Chunk(dtensors.local(tensor), dtensors.offsets(tensor))
            for name, tensor in tensors.items()
            if dtensors.local(tensor).numel() or not tensor.numel()
        }
        if self._executor is None:
            self._write(step, tree, chunks)
            return
        self._pending = self._executor.submit(self._write, step, tree, self._copied(chunks))

    def _copied(self, chunks: Mapping[str, _Chunk]) -> dict[str, _Chunk]:
        """Copy chunks into the host memory of the last save's copies, if they fit into it."""
        sizes = [-(-chunk.local.nbytes // _ALIGNMENT) * _ALIGNMENT for chunk in chunks.values()]
        devices = {chunk.local.device for chunk in chunks.values() if chunk.local.is_cuda}
        if sum(sizes) > self._memory.numel():
            self._free()
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
            if devices:  # not by torch's allocator, which would round it up to a power of two
                start, size = self._memory.data_ptr(), self._memory.numel()
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(start, size, 0))
                self._is_pinned = True
        copies = {}
        pieces = self._memory[: sum(sizes)].split(sizes)
        for (name, chunk), piece in zip(chunks.items(), pieces, strict=True):
            local = chunk.local.detach()
            copy = piece[: local.nbytes].view(local.dtype).view(local.shape)
            copies[name] = chunk._replace(local=copy.copy_(local, non_blocking=local.is_cuda))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _free(self) -> None:
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._is_pinned = self._memory.new_empty(0), False

    def _write(self, step: int, tree: str, chunks: Mapping[str, _Chunk]) -> None:
        """Write a checkpoint on all ranks; all ranks raise an error if one fails."""
        path, is_first = self.path(step), collectives.rank() == 0
        # Of this attempt: another one that writes this step, too, does not meet it.
        partial = path.with_name(f".{path.name}.{self._lock.attempt}.partial")
        written: dict[str, list[Any]] = {}
        problem = None
        try:
            self._lock.check()
            written = _write_rank(partial, chunks)
        except (OSError, CheckpointError, TemporaryError) as error:
            problem = f"{one_line(error)} (rank {collectives.rank()})"
        reports = collectives.gather([problem, written], self._group)
        problem = next((line for line, _ in reports if line), None)
        if is_first and problem is None:
            merged = {name: StoredFile(*file) for _, sent in reports for name, file in sent.items()}
            head = Head(step, collectives.world_size(), merged)
            try:
                with files.synced(partial / state_file.FILE) as file:
                    file.write(state_file.encode(head, tree))
                files.sync(partial)
                self._lock.check()
                _replace(path, partial)
            except (OSError, TemporaryError) as error:
                problem = one_line(error)
        problem = collectives.broadcast(problem, self._group)
        if problem is not None:
            if is_first:
                _discard(partial)
            newest = "there is no checkpoint" + " yet" * self._directory.parent.exists()
            if saved := complete(self._directory):
                newest = f"the newest checkpoint is {saved[-1]}"
            raise DiskError(f"{path}: cannot be saved: {problem}; {newest}")
        if is_first:
            for checkpoint in before(path)[: -(self._keep - 1)]:
                _discard(checkpoint)
            _point_last(path)
            if self._directory.name == DIRECTORY:
                _discard(self._directory.parent / run_directory.OVERWRITTEN)

    def path(self, step: int) -> Path:
        return self._directory / step_name(step)

    def wait(self) -> None:
        """Wait for a pending asynchronous save; raise its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    @property
    def waits_for_peers(self) -> bool:
        """Whether an asynchronous save is pending, which all ranks must complete together."""
        return self._group is not None and self._pending is not None and not self._pending.done()

    def newest(self) -> Path | None:
        self.wait()
        return next(reversed(complete(self._directory)), None)

    def close(self) -> None:
        """Wait for a pending save, and stop the writer."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            self._free()


def _write_rank(partial: Path, chunks: Mapping[str, _Chunk]) -> dict[str, list[Any]]:
    """Write this rank's file, if it has tensors; return its size and checksum by name."""
    if not partial.parents[1].is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run directory was removed")
    partial.mkdir(parents=True, exist_ok=True)
    if not chunks:
        return {}
    file = partial / f"rank-{collectives.rank():05d}.safetensors"
    offsets = {name: {"saved_offsets": chunk.offsets} for name, chunk in chunks.items()}
    # Without any offset there is no table of them, which would take long to read.
    has_offsets = any(any(chunk.offsets) for chunk in chunks.values())
    metadata = {tensor_files.SHARDING: json.dumps(offsets)} if has_offsets else {}
    tensors = {name: chunk.local for name, chunk in chunks.items()}
    crc32 = tensor_files.write(file, tensors, metadata)
    files.sync(partial)
    return {file.name: [file.stat().st_size, crc32]}


def _discard(path: Path) -> None:
    with files.optional("old checkpoints cannot be removed here ({})"):
        files.discard(path)


def _replace(path: Path, new: Path) -> None:
    old = new.with_suffix(".replaced")
    if path.exists():
        path.rename(old)
    new.rename(path)
    files.sync(path.parent)
    _discard(old)


def set_aside(directory: Path, resumed: Path) -> list[Path]:
    """Make a checkpoint the newest of its run: move those of an abandoned attempt away.

    ``resumed``: moved back if it was set aside before. Return the new paths of the others.
    """
    others, is_inside = complete(directory), resumed.parent.resolve() == directory.resolve()
    if is_inside:
        others = [path for path in others if step_of(path) > step_of(resumed)]
    folders = (directory / f"abandoned-{number}" for number in itertools.count(1))
    folder = next(path for path in folders if not path.exists())
    if others:
        folder.mkdir()
    # Newest first: if this is interrupted, the remaining checkpoints have no gap.
    moved = [path.rename(folder / path.name) for path in reversed(others)]
    if not is_inside:
        resumed.rename(directory / resumed.name)
    _point_last(directory / resumed.name)
    return sorted(moved)


def _point_last(checkpoint: Path) -> None:
    directory = checkpoint.parent
    if directory.name == DIRECTORY:
        files.point(directory.parent / run_directory.LAST, checkpoint)


def keep_copies(checkpoint: Path, folder: Path, names: set[str]) -> None:
    """Have copies of the checkpoints with these names in a folder: of this one, and no others."""
    try:
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path.name.lstrip(".").startswith(PREFIX) and path.name not in names:
                _discard(path)
        copy, partial = folder / checkpoint.name, folder / f".{checkpoint.name}.partial"
        if not copy.exists():
            partial.mkdir()
            for path in checkpoint.glob("[!.]*"):
                files.copy(path, partial / path.name)
            partial.rename(copy)
    except OSError as error:
        raise DiskError(f"{folder}: {checkpoint.name} cannot be kept: {one_line(error)}") from None
