"""How a run ended, in one line, for the script that has started it.

Exit codes do not tell: srun and torchrun make their own of them. The file that ``TRAINER_OUTCOME``
names does: ``finished step 120``, ``preempted SIGUSR1 step 57``, or ``failed rank 1: ValueError:
bad``. If there is none, the run was ended before it could say anything.
"""

import contextlib
import os
from pathlib import Path

from . import files

FILE = "TRAINER_OUTCOME"


def keep_path() -> None:
    """Have the file stay where it is, should user code change the working directory."""
    if path := _path():
        os.environ[FILE] = str(path.absolute())


def forget() -> None:
    """Remove what an earlier attempt has told; for the main rank, as it begins."""
    if path := _path():
        path.unlink(missing_ok=True)


def tell(line: str) -> None:
    """Tell how the run ended; for the main rank."""
    if path := _path():
        files.write_atomically(path, f"{line}\n")


def tell_failure(reason: str) -> None:
    """Tell why the run failed, unless another rank has told first; for any rank.

    Args:
        reason: the last line of it counts.
    """
    lines = reason.strip().splitlines()
    if (path := _path()) and lines:
        # What has failed is shown, too; that it cannot be told must not take its place.
        with contextlib.suppress(OSError, ValueError):
            files.write_first(path, f"failed {lines[-1]}\n")


def _path() -> Path | None:
    name = os.environ.get(FILE)
    return Path(name) if name else None
