"""Writes checkpoints: a directory a step, written beside and renamed when it is whole."""

import datetime
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CheckpointError
from ..launch import collectives
from . import dtensors, safetensors_writer, state_file
from .reading import PREFIX, complete, step_of
from .state_file import Head, Packing, StoredFile

_ABANDONED = "abandoned"


@dataclass(frozen=True)
class _Chunk:
    """A tensor, or this rank's shard of one, and where it begins in the whole."""

    part: Tensor
    offsets: list[int]


class Checkpoints:
    """Writes the checkpoints of a run and keeps the newest.

    Args:
        directory: of the run's checkpoints, one directory a step.
        keep: how many to keep, at least two, so that one is whole at every moment.
        asynchronous: copy the state and write it while training goes on.
        timeout_seconds: after which a save that another process does not join fails, where it is
            asynchronous; otherwise the process group says.
    """

    def __init__(
        self,
        directory: Path,
        keep: int = 2,
        asynchronous: bool = False,
        timeout_seconds: float = 600.0,
    ) -> None:
        self._directory = directory
        self._keep = max(keep, 2)
        self._executor = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None
        if asynchronous and collectives.is_active():
            # A group of its own: the writer's collectives must not mix with those of the step.
            timeout = datetime.timedelta(seconds=timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        # Here and not before each save: another rank may then be about to write already.
        if collectives.rank() == 0:
            for partial in directory.glob(f".{PREFIX}*"):
                shutil.rmtree(partial, ignore_errors=True)

    def save(self, step: int, state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
        """Save a step's state; to be called by every rank.

        Args:
            step: optimizer steps made.
            state: the same on every process: numbers, text, tensors in dicts and lists.
            own: this process' tensors (its random state).

        Raises:
            CheckpointError: the state holds something that a checkpoint cannot carry, or it could
                not be written: then on every rank.
        """
        self.wait()
        packing = Packing()
        tree = json.dumps(packing.pack(dict(state), "state", collectives.rank() == 0))
        tensors = packing.tensors
        tensors |= {f"ranks/{collectives.rank()}/{key}": value for key, value in own.items()}
        chunks = {
            name: _chunk(name, each)
            for name, each in tensors.items()
            if dtensors.local(each).numel() or not each.numel()
        }
        path = self._directory / f"{PREFIX}{step:08d}"
        head = Head(step, collectives.world_size(), {})
        if self._executor is None:
            _write(path, head, tree, chunks, None)
            self._prune(path)
        else:
            copies = {name: replace(each, part=_copy(each.part)) for name, each in chunks.items()}
            self._pending = self._executor.submit(self._write_copies, path, head, tree, copies)

    def _write_copies(
        self, path: Path, head: Head, tree: str, copies: Mapping[str, _Chunk]
    ) -> None:
        _write(path, head, tree, copies, self._group)
        self._prune(path)

    def _prune(self, newest: Path) -> None:
        if collectives.rank() != 0:
            return
        older = [path for path in complete(self._directory) if step_of(path) < step_of(newest)]
        for path in older[: -(self._keep - 1)]:
            doomed = path.with_name(f".{path.name}.pruned")
            path.rename(doomed)  # so that a kill half-way leaves no checkpoint that is not whole
            shutil.rmtree(doomed, ignore_errors=True)

    def wait(self) -> None:
        """Wait for a checkpoint that is being written; raise what went wrong."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole; ``None`` if there is none."""
        self.wait()
        found = complete(self._directory)
        return found[-1] if found else None

    def close(self) -> None:
        """Wait, and end the writer."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()


def _chunk(name: str, tensor: Tensor) -> _Chunk:
    if not safetensors_writer.can_hold(tensor.dtype):
        raise CheckpointError(
            f"{name} is a tensor of {tensor.dtype}, which safetensors files cannot hold; convert it"
        )
    return _Chunk(dtensors.local(tensor), dtensors.offsets(tensor))


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _write(
    path: Path,
    head: Head,
    tree: str,
    chunks: Mapping[str, _Chunk],
    group: dist.ProcessGroup | None,
) -> None:
    """Write a checkpoint together; all ranks raise if one could not."""
    partial = path.with_name(f".{path.name}.partial")
    files: dict[str, list[Any]] = {}
    problem = None
    try:
        files = _write_own(partial, chunks)
    except OSError as error:
        problem = _reason(error)
    told = collectives.gather([problem, files], group)
    problems = [f"{each[0]} (rank {rank})" for rank, each in enumerate(told) if each[0]]
    problem = problems[0] if problems else None
    if collectives.rank() == 0 and problem is None:
        merged = {name: StoredFile(*each) for part in told for name, each in part[1].items()}
        try:
            _finish(path, partial, state_file.encode(replace(head, files=merged), tree))
        except OSError as error:
            problem = _reason(error)
    problem = collectives.broadcast(problem, group)
    if problem is not None:
        if collectives.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(_not_saved(path, problem))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _not_saved(path: Path, problem: str) -> str:
    whole = complete(path.parent)
    newest = f"the newest checkpoint is {whole[-1]}" if whole else "there is no checkpoint yet"
    return f"{path}: cannot be saved: {problem}; {newest}"


def _write_own(partial: Path, chunks: Mapping[str, _Chunk]) -> dict[str, list[Any]]:
    """Write this rank's file, if it has anything to write; its size and checksum, by its name."""
    partial.mkdir(parents=True, exist_ok=True)
    if not chunks:
        return {}
    file = partial / f"rank-{collectives.rank():05d}.safetensors"
    # As torch.distributed.checkpoint's HuggingFaceStorageReader wants it.
    offsets = {name: {"saved_offsets": each.offsets} for name, each in chunks.items()}
    tensors = {name: each.part for name, each in chunks.items()}
    checksum = safetensors_writer.write(file, tensors, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    _sync_directory(partial)
    return {file.name: [file.stat().st_size, f"{checksum:08x}"]}


def _finish(path: Path, partial: Path, state: bytes) -> None:
    with (partial / state_file.FILE).open("wb") as file:
        file.write(state)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(partial)
    old = path.with_name(f".{path.name}.replaced")
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def set_aside(directory: Path, resumed: Path) -> list[Path]:
    """Make a checkpoint the newest of its run: move those of an abandoned attempt away.

    Args:
        directory: of the run's checkpoints.
        resumed: the checkpoint that training resumes from. One that had been set aside before is
            brought back.

    Returns:
        where the others are now.
    """
    others = complete(directory)
    if resumed.parent.resolve() == directory.resolve():
        others = [path for path in others if step_of(path) > step_of(resumed)]
    moved = []
    folder = _free(directory)
    # The newest first: whenever this is interrupted, no later checkpoint follows a gap.
    for path in reversed(others):
        folder.mkdir(exist_ok=True)
        moved.append(path.rename(folder / path.name))
    if resumed.parent.resolve() != directory.resolve():
        resumed.rename(directory / resumed.name)
    return sorted(moved)


def _free(directory: Path) -> Path:
    number = 1
    while (folder := directory / f"{_ABANDONED}-{number}").exists():
        number += 1
    return folder
