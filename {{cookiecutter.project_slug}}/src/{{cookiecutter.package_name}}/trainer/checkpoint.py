"""Checkpoints: a directory a step, written beside and renamed when whole; loading runs no code.

A checkpoint holds ``state.json`` (all that is no tensor, and a list of the files) and safetensors
files, written by torch.distributed.checkpoint, each process its shards. Nothing in it is pickled:
its reader takes JSON and safetensors, and refuses a directory that holds anything else.
"""

import datetime
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import distributed, dtensors
from .errors import CheckpointError
from .stored_tensors import Stored, StoredTensors, first_line, read_all, without_advice

_STATE = "state.json"
_FORMAT = 1
_PREFIX = "step-"


class Spread(dict[str, Any]):
    """A dict whose entries are spread over the processes: each holds some, a checkpoint all."""


class Checkpoints:
    """Writes the checkpoints of a run and keeps the newest.

    Args:
        directory: where they lie, one directory a step.
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
        if asynchronous and distributed.is_active():
            # A group of its own: the writer's collectives must not mix with those of the step.
            timeout = datetime.timedelta(seconds=timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        # Here and not before each save: another rank may then be about to write already.
        if distributed.rank() == 0:
            for partial in directory.glob(f".{_PREFIX}*"):
                shutil.rmtree(partial, ignore_errors=True)

    def save(self, step: int, state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
        """Save a step's state.

        Args:
            step: optimizer steps made.
            state: the same on every process: numbers, text, tensors in dicts and lists.
            own: this process' tensors (its random state).

        Raises:
            CheckpointError: the state holds something that a checkpoint cannot carry.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        if not isinstance(state, dict):
            state = dict(state)
        tree = _pack(state, "state", tensors)
        tensors |= {f"ranks/{distributed.rank()}/{key}": value for key, value in own.items()}
        text = json.dumps(tree)
        path = self._directory / f"{_PREFIX}{step:08d}"
        if self._executor is None:
            _write(path, text, _separate(tensors), self._keep, None)
        else:
            copies = {key: dtensors.with_local(each, _copy) for key, each in tensors.items()}
            self._pending = self._executor.submit(
                _write, path, text, copies, self._keep, self._group
            )

    def wait(self) -> None:
        """Wait for a checkpoint that is being written; raise what went wrong."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Wait, and end the writer."""
        self.wait()
        if self._executor is not None:
            self._executor.shutdown()


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _write(
    path: Path,
    text: str,
    tensors: dict[str, Tensor],
    keep: int,
    group: dist.ProcessGroup | None,
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner

    from .safetensors_writer import SafetensorsWriter

    partial = path.with_name(f".{path.name}.partial")

    def finish() -> None:
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        world_size = distributed.world_size()
        head = json.dumps({"format": _FORMAT, "world_size": world_size, "files": files})
        with (partial / _STATE).open("w") as file:
            file.write(f'{{"head": {head}, "state": {text}}}')
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(partial)
        _replace(partial, path)
        _prune(path.parent, keep)

    with without_advice():
        dcp.save(
            tensors,
            # Rank 0's copy of what all have: a BatchNorm's statistics, which DDP takes from rank 0,
            # are not the same on the others.
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            storage_writer=SafetensorsWriter(partial, distributed.rank(), finish),
            process_group=group,
            no_dist=not distributed.is_active(),
        )


def _replace(partial: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.replaced")
    if path.exists():
        path.rename(old)
    partial.rename(path)
    _sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, none in the memory of another: all that safetensors files hold."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()

    def apart(value: Tensor) -> Tensor:
        contiguous = value.detach().contiguous()
        pointer = contiguous.untyped_storage().data_ptr()
        if pointer in seen:
            return contiguous.clone()
        seen.add(pointer)
        return contiguous

    for key, value in tensors.items():
        separate[key] = dtensors.with_local(value, apart)
    return separate


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _prune(directory: Path, keep: int) -> None:
    for path in complete(directory)[:-keep]:
        doomed = path.with_name(f".{path.name}.pruned")
        path.rename(doomed)  # so that a kill half-way leaves no checkpoint that is not whole
        shutil.rmtree(doomed, ignore_errors=True)


def complete(directory: Path) -> list[Path]:
    """Whole checkpoints below a directory, the oldest first."""
    return sorted(path for path in directory.glob(f"{_PREFIX}*") if (path / _STATE).is_file())


def resolve(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run's directory.

    Raises:
        CheckpointError: there is none.
    """
    given = Path(path)
    if (given / _STATE).is_file():
        return given
    for directory in (given / "checkpoints", given):
        found = complete(directory)
        if found:
            return found[-1]
    raise CheckpointError(
        f"{given}: no checkpoint there; give a run's directory or a checkpoint in it"
    )


class Checkpoint:
    """A checkpoint on disk, checked and ready to be read.

    Args:
        path: its directory.

    Raises:
        CheckpointError: it is damaged, or holds what training did not write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored: StoredTensors | None = None
        try:
            content = json.loads((path / _STATE).read_bytes())
            head = content["head"]
            self._tree = content["state"]
            self.world_size = int(head["world_size"])
            files, version = dict(head["files"]), head["format"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{path / _STATE}: not a checkpoint's state ({first_line(error)})"
            ) from None
        if version != _FORMAT:
            raise CheckpointError(
                f"{path}: written in format {version}; this trainer reads {_FORMAT}"
            )
        self._check_files(files)

    def _check_files(self, expected: Mapping[str, int]) -> None:
        found = {
            each.name: each.stat().st_size for each in self.path.iterdir() if each.name != _STATE
        }
        for name in sorted(found.keys() | expected.keys()):
            if name not in found:
                raise CheckpointError(f"{self.path}: {name} is missing")
            if name not in expected or not name.endswith(".safetensors"):
                raise CheckpointError(f"{self.path}: {name} was not written by training; not read")
            if found[name] != expected[name]:
                raise CheckpointError(
                    f"{self.path}: {name} has {found[name]} bytes, {expected[name]} were written"
                )

    def state(self) -> dict[str, Any]:
        """What was saved as ``state``, its tensors on the CPU."""
        state: dict[str, Any] = read_all(self.stored_state())
        return state

    def stored_state(self) -> dict[str, Any]:
        """What was saved as ``state``, its tensors not read yet: each is a ``Stored``."""
        try:
            state = _unpack(self._tree, self._tensors())
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: damaged ({first_line(error)})") from None
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.path}: damaged (its state is no dict)")
        return state

    def own(self, rank: int) -> dict[str, Tensor]:
        """The tensors of one process."""
        prefix = f"ranks/{rank}/"
        stored = self._tensors()
        names = [name for name in stored if name.startswith(prefix)]
        return {name.removeprefix(prefix): stored[name].read() for name in names}

    def _tensors(self) -> StoredTensors:
        if self._stored is None:
            self._stored = StoredTensors(self.path)
        return self._stored


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for a value; its tensors go into ``tensors``, by path."""
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, Tensor):
        name = path
        while name in tensors:  # of the keys 1 and "1", say
            name += "~"
        tensors[name] = value
        return {"~tensor": name}
    if isinstance(value, Spread):
        own = {key: _pack(each, f"{path}/{key}", tensors) for key, each in value.items()}
        return {key: tree for part in distributed.gather(own) for key, tree in part.items()}
    if isinstance(value, dict | Counter | Mapping):
        kind = "~counter" if isinstance(value, Counter) else "~dict"
        if kind == "~dict" and all(isinstance(key, str) and key[:1] != "~" for key in value):
            return {key: _pack(each, f"{path}/{key}", tensors) for key, each in value.items()}
        for key in value:
            if key is not None and type(key) not in (bool, int, float, str):
                raise CheckpointError(
                    f"{path} has a {type(key).__name__} as a key; give a number or text"
                )
        return {kind: [[key, _pack(each, f"{path}/{key}", tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        items = [_pack(each, f"{path}/{index}", tensors) for index, each in enumerate(value)]
        return items if isinstance(value, list) else {"~tuple": items}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}; a checkpoint carries numbers, text and tensors in "
        "dicts, lists and tuples"
    )


def _unpack(tree: Any, tensors: Mapping[str, Stored]) -> Any:
    if isinstance(tree, list):
        return [_unpack(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if "~tensor" in tree:
        return tensors[tree["~tensor"]]
    if "~tuple" in tree:
        return tuple(_unpack(each, tensors) for each in tree["~tuple"])
    if "~counter" in tree:
        return Counter({key: _unpack(each, tensors) for key, each in tree["~counter"]})
    if "~dict" in tree:
        return {key: _unpack(each, tensors) for key, each in tree["~dict"]}
    return {key: _unpack(each, tensors) for key, each in tree.items()}
