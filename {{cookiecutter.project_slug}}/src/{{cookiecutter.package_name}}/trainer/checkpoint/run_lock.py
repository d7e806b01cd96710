"""A lock on a run's directory, so that two trainings never write into one."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from ..errors import UserError

_FILE = ".lock"
# A rank that was just killed may not be gone yet.
_SECONDS = 10.0
_POLL_SECONDS = 0.1
_TAKEN = (errno.EAGAIN, errno.EACCES)


class RunLock:
    """Held by the rank that writes a run's directory, until it is released or the process ends.

    A POSIX record lock: network file systems know it, and a forked loader worker that outlives its
    rank does not hold it.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def acquire(self, directory: Path) -> str | None:
        """Take the lock of a directory.

        Returns:
            a remark, where the file system has no locks.

        Raises:
            UserError: another process holds it, or the directory cannot be written.
        """
        path = directory / _FILE
        try:
            file = path.open("a+")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from None
        deadline = time.monotonic() + _SECONDS
        while (problem := _try(file)) in _TAKEN:
            if time.monotonic() > deadline:
                holder = _holder(file)
                file.close()
                raise UserError(
                    f"{directory}: another training writes there ({holder}); wait for its end, or "
                    "give another run_name"
                )
            time.sleep(_POLL_SECONDS)
        if problem:
            file.close()
            return (
                f"{directory}: its file system has no locks ({os.strerror(problem)}): nothing "
                "keeps a second training from writing there"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file
        return None

    def close(self) -> None:
        """Give it back, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _try(file: IO[str]) -> int:
    """The error's number; 0 if the lock is taken now."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno or errno.ENOLCK
    return 0


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read(200).strip() or "unknown"
