"""Write files that other processes may read at the same time."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def shown(path: Path, directory: Path) -> Path:
    """Path to display to a user in a directory: relative if it is inside the directory."""
    return path.relative_to(directory) if path.is_relative_to(directory) else path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees the old or the new content."""
    beside = _write_temporary(path, text)
    beside.replace(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file to write in this context; after it the file replaces ``path``, or is removed."""
    beside = _beside(path)
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Like :func:`write_atomically`, with read permission for this user only."""
    _write_temporary(path, text, mode=0o600).replace(path)


def write_first(path: Path, text: str) -> None:
    """Write a text file atomically unless it exists."""
    beside = _write_temporary(path, text)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink()


def _write_temporary(path: Path, text: str, mode: int = 0o666) -> Path:
    """Write text to a new file in the same directory and fsync it."""
    beside = _beside(path)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return beside


def _beside(path: Path) -> Path:
    # Not named by process id: another node or container may use the same one.
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")
