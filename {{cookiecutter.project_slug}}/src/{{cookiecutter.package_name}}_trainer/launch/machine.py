"""Failures of the machine, and of no code: they are reported in one line, without a traceback."""

import errno
import re
import traceback
from pathlib import Path

_TRAINER = Path(__file__).parents[1]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Of torch/utils/data/dataloader.py, and of its handler of SIGCHLD, which raises anywhere.
_WORKER = re.compile(r"DataLoader worker \(pid[^)]*(?:\(s\) [^)]*)?\) [^.]*")


def explain(error: BaseException, directory: Path) -> str | None:
    """Describe a full disk, or a loader's worker that was killed; ``None`` for other errors.

    Args:
        error: The error.
        directory: Where the trainer writes.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = Path(last.filename).is_relative_to(_TRAINER)
        place = str(directory) if is_ours else f"{last.filename}, line {last.lineno}"
        return f"{error.strerror}: {error.filename or place}"
    worker = _WORKER.match(str(error)) if isinstance(error, RuntimeError) else None
    if worker is None:
        return None
    return f"{worker[0]}; if nobody killed it, memory ran out: give the loader fewer num_workers"
