"""Write files that other processes may read at the same time."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import UserError


def shown(path: Path, directory: Path) -> Path:
    """Path to display to a user in a directory: relative if it is inside the directory."""
    return path.relative_to(directory) if path.is_relative_to(directory) else path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write in this context; after it the file replaces ``path``, or is removed."""
    # Not named by process id: another node or container may use the same one.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file atomically: a reader sees the old or the new content."""
    with replacing(path) as beside:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def write_first(path: Path, text: str) -> None:
    """Write a text file atomically unless it exists."""
    with contextlib.suppress(FileExistsError), replacing(path) as beside:
        write_atomically(beside, text)
        os.link(beside, path)  # then replaced by itself


def check_private(folder: Path) -> None:
    """Raise UserError if others than this user can open a folder."""
    found = folder.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.geteuid():
        raise UserError(f"{folder} is not a folder that only this user can open; set TMPDIR")
