"""Text files that others read while they are written."""

import contextlib
import os
import secrets
from pathlib import Path


def shown(path: Path, directory: Path) -> Path:
    """A path as a user would write it in a directory: relative if it is below."""
    return path.relative_to(directory) if path.is_relative_to(directory) else path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a part."""
    beside = _written_beside(path, text)
    beside.replace(path)


def write_private(path: Path, text: str) -> None:
    """As :func:`write_atomically`, for a file that only this user may read."""
    _written_beside(path, text, mode=0o600).replace(path)


def write_first(path: Path, text: str) -> None:
    """Write a text file unless there is one, of which a reader sees all or nothing."""
    beside = _written_beside(path, text)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink()


def _written_beside(path: Path, text: str, mode: int = 0o666) -> Path:
    """A file with this text on the same disk, safe there even if the machine fails."""
    # Not by the process' number, which another node's or container's may have too.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return beside
