"""Lock a run directory, so that two training runs never write to the same one."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from ..errors import UserError

# A rank that was just killed may still be exiting.
_SECONDS = 10.0
_POLL_SECONDS = 0.1
_TAKEN = (errno.EAGAIN, errno.EACCES)


class RunLock:
    """Lock of a run directory, held by the rank that writes to it until release or process exit.

    Uses a POSIX record lock: network file systems support it, and a forked DataLoader worker that
    outlives its rank does not hold it.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def acquire(self, directory: Path) -> str | None:
        """Acquire the lock of a directory.

        Returns:
            A note, if the file system does not support locks.

        Raises:
            UserError: Another process holds it, or the directory is not writable.
        """
        path = directory / ".lock"
        try:
            # Through a link, another file would be truncated.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            reason = "it is a link; remove it" if error.errno == errno.ELOOP else error.strerror
            raise UserError(f"{path}: cannot be written ({reason})") from None
        self._file = file = os.fdopen(descriptor, "a+")
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _TAKEN:
                    return (
                        f"{directory}: its file system has no locks ({error.strerror}): a second "
                        "training run could write to it too"
                    )
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read(200).strip() or "unknown"
                self.close()
                raise UserError(
                    f"{directory}: another training run writes to it ({holder}); wait until it "
                    "ends, or use another run_name; see docs/trouble.md#another-run-writes-there"
                )
            time.sleep(_POLL_SECONDS)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return None

    def close(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None
