"""Reads checkpoints. Loading runs no code, and takes nothing that has changed since it was saved.

A checkpoint is a directory that holds ``state.json`` (:mod:`.state_file`) and safetensors
files, each rank's shards in one. ``state.json`` lists the files with their sizes and checksums.
"""

import re
import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from . import state_file
from .stored_tensors import StoredTensors, first_line, read_all

PREFIX = "step-"
DIRECTORY = "checkpoints"
_NAME = re.compile(r"step-(\d{1,16})")
_BYTES_AT_ONCE = 1 << 22


def step_of(path: Path) -> int:
    """The step that a checkpoint's directory is named after; -1 if it has another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def complete(directory: Path) -> list[Path]:
    """Whole checkpoints in a directory, the oldest first."""
    return [path for path in _named(directory) if _is_checkpoint(path)]


def _named(directory: Path) -> list[Path]:
    """What has the name of a checkpoint and is not empty, the oldest first."""
    found = (path for path in directory.glob(f"{PREFIX}*") if step_of(path) >= 0)
    return sorted((path for path in found if any(path.glob("*"))), key=step_of)


def candidates(path: str | Path) -> list[Path]:
    """The checkpoints that a path may mean, the best first.

    Args:
        path: a checkpoint: that alone; or a run's directory, or the one of its checkpoints: all of
            them, the newest first, even those that lack their ``state.json``.

    Raises:
        CheckpointError: there is none.
    """
    given = Path(path)
    if _is_checkpoint(given):
        return [given]
    for directory in (given / DIRECTORY, given):
        if found := _named(directory):
            return found[::-1]
    raise CheckpointError(
        f"{given}: no checkpoint there; give a run's directory or a checkpoint in it"
    )


def resolve(path: str | Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a run's directory.

    Raises:
        CheckpointError: there is none.
    """
    return candidates(path)[0]


def run_of(checkpoint: Path) -> Path | None:
    """The run that a checkpoint belongs to; ``None`` if it was copied somewhere else."""
    # One that was set aside is in a folder of its own.
    for folder in checkpoint.absolute().parents[:2]:
        if folder.name == DIRECTORY:
            return checkpoint.parents[checkpoint.absolute().parents.index(folder) + 1]
    return None


def _is_checkpoint(path: Path) -> bool:
    return (path / state_file.FILE).is_file()


class Checkpoint:
    """A checkpoint on disk whose ``state.json`` is whole, and whose files have the right sizes.

    Args:
        path: its directory.

    Raises:
        CheckpointError: it is damaged, or holds what training did not write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored: StoredTensors | None = None
        try:
            self._head, self._tree = state_file.decode((path / state_file.FILE).read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{path / state_file.FILE}: {reason}") from None
        if step_of(path) not in (-1, self._head.step):
            raise CheckpointError(
                f"{path / state_file.FILE}: of step {self._head.step}, not of the step that "
                "the directory is named after"
            )
        self._check_files()

    @property
    def world_size(self) -> int:
        """How many ranks have saved it."""
        return self._head.world_size

    @property
    def step(self) -> int:
        """Optimizer steps made when it was saved."""
        return self._head.step

    def _check_files(self) -> None:
        expected = self._head.files
        found = {each.name for each in self.path.iterdir()} - {state_file.FILE}
        for name in sorted(found | expected.keys()):
            if name not in found:
                raise CheckpointError(f"{self.path}: {name} is missing")
            if name not in expected or not name.endswith(".safetensors"):
                raise CheckpointError(f"{self.path}: {name} was not written by training; not read")
            size = (self.path / name).stat().st_size
            if size != expected[name].size:
                raise CheckpointError(
                    f"{self.path}: {name} has {size} bytes, {expected[name].size} were written"
                )

    def check_contents(self, reader: int = 0, readers: int = 1) -> None:
        """Compare the files with their checksums.

        Args:
            reader: which of the readers among whom the files are divided this one is.
            readers: how many there are.

        Raises:
            CheckpointError: the content of a file has changed since it was saved.
        """
        for name in sorted(self._head.files)[reader::readers]:
            if _checksum(self.path / name) != self._head.files[name].crc32:
                raise CheckpointError(
                    f"{self.path}: {name}: its content has changed since it was saved"
                )

    def state(self) -> dict[str, Any]:
        """What was saved as ``state``, its tensors on the CPU."""
        state: dict[str, Any] = read_all(self.stored_state())
        return state

    def stored_state(self) -> dict[str, Any]:
        """What was saved as ``state``, its tensors not read yet: each is a ``Stored``."""
        try:
            state = state_file.unpack(self._tree, self._tensors())
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


def _checksum(path: Path) -> str:
    buffer = memoryview(bytearray(_BYTES_AT_ONCE))
    checksum = 0
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum = zlib.crc32(buffer[:count], checksum)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    return f"{checksum:08x}"
