"""The directories of checkpoints: their names, and which are in a directory of a run."""

import re
from pathlib import Path

from . import state_file

PREFIX = "step-"
DIRECTORY = "checkpoints"
_NAME = re.compile(r"step-(\d{1,16})")


def step_name(step: int) -> str:
    """Name of the directory of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint directory; -1 if it has another name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is that of a checkpoint that has been written to its end."""
    return (path / state_file.FILE).is_file()


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints in a directory, oldest first."""
    return [path for path in named(directory) if is_checkpoint(path)]


def before(path: Path) -> list[Path]:
    """Complete checkpoints of earlier steps in the same directory, oldest first."""
    return [each for each in complete(path.parent) if step_of(each) < step_of(path)]


def named(directory: Path) -> list[Path]:
    """Non-empty directories that are named like a checkpoint, oldest first."""
    found = (path for path in directory.glob(f"{PREFIX}*") if step_of(path) >= 0)
    return sorted((path for path in found if any(path.glob("*"))), key=step_of)
