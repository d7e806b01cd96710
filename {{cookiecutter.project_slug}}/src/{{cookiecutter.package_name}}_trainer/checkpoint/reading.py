"""Read checkpoints. Loading runs no code, and detects any change since the checkpoint was saved.

A checkpoint is a directory that contains ``state.json`` (:mod:`.state_file`) and safetensors
files, one per rank with its shards. ``state.json`` lists the files with sizes and checksums.
"""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, one_line, unreadable
from ..launch import files
from . import state_file
from .run_directory import DIRECTORY, is_checkpoint, named, step_of
from .stored_tensors import Stored, checksum, find_tensors, read_all

OF_ANOTHER_MODEL = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
AVERAGE = "average"  # in the state of a callback: its average of the weights, by name
_USED = (
    "weights: the average of {}, which validations of the fit used; for those of training: "
    "--averaged false, or averaged=False"
)


def candidates(path: str | Path) -> list[Path]:
    """The checkpoints that a path may refer to, also damaged ones, newest first; at least one."""
    target = files.pointed(Path(path))  # the name of what it points to has the step
    if is_checkpoint(target):
        return [target]
    for directory in (target / DIRECTORY, target):
        if checkpoints := named(directory):
            return checkpoints[::-1]
    advice = "give a run directory or a checkpoint in it"
    raise CheckpointError(f"{target}: no checkpoint there; {advice}")


def resolve(path: str | Path) -> Path:
    """The checkpoint that a path refers to: the first of :func:`candidates`."""
    return candidates(path)[0]


def run_of(checkpoint: Path) -> Path | None:
    """The run directory of a checkpoint; ``None`` if the checkpoint was copied elsewhere."""
    # A checkpoint that was set aside is in a separate folder.
    for folder in Path(os.path.normpath(checkpoint.absolute())).parents[:2]:
        if folder.name == DIRECTORY:
            run = folder.parent
            return run if checkpoint.is_absolute() else Path(os.path.relpath(run))
    return None


class Checkpoint:
    """A checkpoint on disk with a valid ``state.json`` and files of the right sizes.

    ``step``: number of optimizer steps when it was saved; ``world_size``: of the ranks that saved.
    A CheckpointError says if it is corrupt, or contains objects that training did not write.
    """

    def __init__(self, path: Path) -> None:
        self.path, file = path, path / state_file.FILE
        try:
            head, self._tree = state_file.decode(file.read_bytes())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise unreadable(f"{file}: {reason}", error) from None
        self.step, self.world_size, self._files = head.step, head.world_size, head.files
        if step_of(path) not in (-1, head.step):
            other = "not of the step that the directory is named after"
            raise CheckpointError(f"{file}: of step {head.step}, {other}")
        # Hidden ones are of the file system: .nfs0001, .DS_Store.
        present = {entry.name for entry in path.iterdir() if entry.name[0] != "."}
        for name in sorted((present - {state_file.FILE}) | head.files.keys()):
            if name not in present:
                raise CheckpointError(f"{path}: {name} is missing")
            if name not in head.files or not name.endswith(".safetensors"):
                raise CheckpointError(f"{path}: {name} was not written by training; not read")
            size, written = (path / name).stat().st_size, head.files[name].size
            if size != written:
                raise CheckpointError(f"{path}: {name} has {size} bytes, {written} were written")

    def mismatch(self, error: Exception) -> CheckpointError:
        """The error where loading raised one of ``OF_ANOTHER_MODEL``."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        advice = "see docs/trouble.md#a-checkpoint-of-another-model"
        return CheckpointError(f"{self.path}: does not match this model ({reason}); {advice}")

    def check_contents(self, reader: int = 0, readers: int = 1) -> None:
        """Raise CheckpointError if a file has changed; each of several readers checks some."""
        for name in sorted(self._files)[reader::readers]:
            try:
                crc32 = checksum(self.path / name)
            except OSError as error:
                reason = f"cannot be read ({error.strerror})"
                raise unreadable(f"{self.path / name}: {reason}", error) from None
            if crc32 != self._files[name].crc32:
                damage = "its content has changed since it was saved"
                raise CheckpointError(f"{self.path}: {name}: {damage}")

    def state(self) -> dict[str, Any]:
        """The saved state, with tensors on the CPU, after :meth:`check_contents`."""
        self.check_contents()
        return dict(read_all(self.stored_state()))

    def stored_state(self) -> dict[str, Any]:
        """The saved state, with tensors not read yet: each is a ``Stored``."""
        try:
            state = state_file.unpack(self._tree, self._tensors)
            if not isinstance(state, dict):
                raise TypeError("its state is not a dict")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._damaged(error) from None
        return state

    def weights(self, averaged: bool = True) -> tuple[dict[str, Any], list[str]]:
        """The state of the model by name, with tensors not read yet, and a line about an average.

        ``averaged``: use a callback's average, such as EMA, if there is one: validations used it.
        """
        state = self.stored_state()
        try:
            model = dict(state["model"])
            for name, saved in state.get("callbacks", {}).items() if averaged else ():
                average = saved.get(AVERAGE)
                if isinstance(average, Mapping) and average and average.keys() <= model.keys():
                    callback = name.partition("(")[0].rpartition(".")[2]
                    return {**model, **average}, [_USED.format(callback)]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise self._damaged(error) from None
        return model, []

    def rank_local_state(self, rank: int) -> dict[str, Tensor]:
        prefix = f"ranks/{rank}/"
        names = [name for name in self._tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._tensors[name].read() for name in names}

    @cached_property
    def _tensors(self) -> dict[str, Stored]:
        return find_tensors(self.path)

    def _damaged(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged ({type(error).__name__}: {one_line(error)})")
