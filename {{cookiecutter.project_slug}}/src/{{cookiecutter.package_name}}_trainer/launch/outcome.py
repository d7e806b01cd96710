"""Write the outcome of a run, in one line, for the script that started it.

The file named by ``TRAINER_OUTCOME`` contains ``finished step 120``, ``preempted SIGUSR1 step 57``,
or ``failed rank 1: ValueError: bad``; srun and torchrun replace exit codes. If the file does not
exist, the run was killed.
"""

import contextlib
import os
from pathlib import Path

from . import files

FILE = "TRAINER_OUTCOME"


def make_path_absolute(directory: Path) -> None:
    """Let a relative path mean a file in ``directory``, whatever directory user code changes to."""
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
    """Write the last line of an error, unless another rank has done so; called by any rank."""
    if (path := _path()) and (lines := reason.strip().splitlines()):
        # The failure is printed too; an error while writing the file must not replace it.
        with contextlib.suppress(OSError, ValueError):
            files.write_first(path, f"failed {lines[-1]}\n")


def _path() -> Path | None:
    return Path(os.environ[FILE]) if os.environ.get(FILE) else None
