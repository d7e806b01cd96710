"""The lock of a run directory: one training writes there, and one that has lost it notices."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import struct
import sys
import time
from pathlib import Path

from ..errors import TemporaryError, refused
from ..launch import files

_SECONDS = 10.0  # a rank that was just killed may still be exiting
_POLL_SECONDS = 0.1
_TAKEN = (errno.EAGAIN, errno.EACCES)
_ADVICE = "see docs/trouble.md#another-run-writes-there"
_held: set[int] = set()
"""Descriptors of this process, which its forks close: a loader's worker may outlive its rank."""


class RunLock:
    """Lock of a run directory, held by the rank that writes to it until release or process exit.

    Two locks on bytes of ``.lock``: a POSIX record lock, which network file systems support and no
    fork holds, but which is lost when any code of this process closes that file, for example a
    copy of the directory. And one of the open file description, for which the reverse holds. The
    file names the attempt that holds it, so that one that has lost both finds another name there.
    """

    def __init__(self) -> None:
        self.attempt = "0"  # its number here and a random text; the same on all ranks
        self._descriptor, self._path, self._content = -1, Path(), b""

    def acquire(self, directory: Path) -> str | None:
        """Acquire the lock of a directory; return a note if its file system has no locks."""
        self._path, deadline = directory / ".lock", time.monotonic() + _SECONDS
        self._open()
        while True:
            with contextlib.suppress(BlockingIOError):
                problem = self._lock()
                if not files.is_replaced(self._descriptor, self._path):
                    self._write_name()
                    return problem and (
                        f"{directory}: its file system has no locks ({problem}): if another "
                        "training run starts to write to it, this one ends"
                    )
                self.close()  # the file of a run that was removed meanwhile
                self._open()
            if time.monotonic() > deadline:
                holder = self._read().decode(errors="replace").strip() or "unknown"
                self.close()
                problem = f"another training run writes to it ({holder})"
                advice = f"wait until it ends, or use another run_name; {_ADVICE}"
                raise TemporaryError(f"{directory}: {problem}; {advice}")
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise TemporaryError if another attempt has the lock: nothing may be written any more."""
        if self.is_lost():
            line = f"another training run writes to it now: this one, attempt {self.attempt}, ends"
            raise TemporaryError(f"{self._path.parent}: {line}; {_ADVICE}")

    def is_lost(self) -> bool:
        """Whether another attempt has the lock that this one had."""
        with contextlib.suppress(OSError):  # it is not held, or this cannot be told
            # If it is removed, nobody has taken it yet.
            is_replaced = files.is_replaced(self._descriptor, self._path) and self._path.exists()
            return is_replaced or self._read() != self._content
        return False

    def close(self) -> None:
        """Release the lock, if this process holds it."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1

    def _open(self) -> None:
        try:
            # Not through a link: the file that it names would be overwritten.
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                error.strerror = "it is a link; remove it"
            raise refused(self._path, error) from None
        _held.add(self._descriptor)

    def _lock(self) -> str | None:
        """Try to lock; return why the file system cannot. BlockingIOError: another one holds it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            if error.errno in _TAKEN:
                raise BlockingIOError from None
            return error.strerror
        if sys.platform == "linux":
            lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 1, 1, 0)
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, lock)
            except OSError as error:
                if error.errno in _TAKEN:
                    raise BlockingIOError from None
        return None

    def _read(self) -> bytes:
        return os.pread(self._descriptor, 200, 0)

    def _write_name(self) -> None:
        before = re.search(rb"attempt (\d{1,9})-", self._read())
        self.attempt = f"{int(before[1]) + 1 if before else 1}-{secrets.token_hex(4)}"
        name = f"process {os.getpid()} on {socket.gethostname()}, attempt {self.attempt}\n"
        self._content = name.encode()[-200:]
        os.pwrite(self._descriptor, self._content, 0)
        os.ftruncate(self._descriptor, len(self._content))


def _close_held() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_held)
