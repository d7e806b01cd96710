"""Temporary folders of launches: one that nobody holds any more is removed by the next launch."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError
from . import files

_LOCK = ".lock"


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[Path]:
    """A folder that only this user can open, removed after this context, or by the next one."""
    remove_left(f"{prefix}*")
    path = Path(tempfile.gettempdir()).absolute()  # not so if TMPDIR is "."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path) as name, os.fdopen(hold(Path(name))):
        yield Path(name)


def hold(folder: Path) -> int:
    """Make a private folder, and lock it until the descriptor is closed, by this process' end."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        files.check_private(folder)
        with contextlib.suppress(FileNotFoundError):  # it is being removed
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with contextlib.suppress(OSError):  # without locks nobody removes it
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not files.is_replaced(descriptor, folder / _LOCK):
                return descriptor
            os.close(descriptor)


def release(folder: Path, descriptor: int) -> None:
    """Stop holding a folder; the last process that holds it removes it."""
    os.close(descriptor)
    remove_left(folder.name)


def remove_left(pattern: str) -> None:
    """Remove temporary folders that nobody holds any more: their processes were killed."""
    for folder in Path(tempfile.gettempdir()).glob(pattern):
        with contextlib.suppress(OSError, UserError):  # it is held, or another user's
            files.check_private(folder)
            with (folder / _LOCK).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                files.discard(folder)
