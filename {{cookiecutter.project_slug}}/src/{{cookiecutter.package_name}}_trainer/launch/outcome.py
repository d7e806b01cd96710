"""Write the outcome of a run, in one line, for the script that started it.

Exit codes are not enough: srun and torchrun replace them. The file named by ``TRAINER_OUTCOME``
contains ``finished step 120``, ``preempted SIGUSR1 step 57``, or ``failed rank 1: ValueError:
bad``. If the file does not exist, the run was killed before it could write it.
"""

import contextlib
import os
from pathlib import Path

from . import files

FILE = "TRAINER_OUTCOME"


def make_path_absolute(directory: Path) -> None:
    """Make the path in ``TRAINER_OUTCOME`` absolute, in case user code changes the directory.

    Args:
        directory: The directory to which a relative path refers.
    """
    if path := _path():
        os.environ[FILE] = str(directory / path)


def remove() -> None:
    """Remove the outcome of an earlier attempt; the main rank calls this at the start."""
    if path := _path():
        path.unlink(missing_ok=True)


def write(line: str) -> None:
    """Write the outcome of the run; called by the main rank."""
    if path := _path():
        files.write_atomically(path, f"{line}\n")


def write_failure(reason: str) -> None:
    """Write why the run failed, unless another rank has done so; called by any rank.

    Args:
        reason: The error message; its last line is written.
    """
    lines = reason.strip().splitlines()
    if (path := _path()) and lines:
        # The failure is printed too; an error while writing the file must not replace it.
        with contextlib.suppress(OSError, ValueError):
            files.write_first(path, f"failed {lines[-1]}\n")


def _path() -> Path | None:
    name = os.environ.get(FILE)
    return Path(name) if name else None
