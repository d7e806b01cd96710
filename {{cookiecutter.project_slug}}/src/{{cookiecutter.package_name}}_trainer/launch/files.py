"""Files that other processes may read or have written, and what not every file system can do.

All symbolic and hard links, modes, syncs of folders and removals of whole folders are here: each is
a convenience, so its failure is a note, and what it was for is there without it.
"""

import contextlib
import importlib.util
import io
import json
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError
from . import output

TEMPORARY = ".*." + "[0-9a-f]" * 16  # pattern of names that replace others, and of what is removed
_LONGEST_PATH = 4096
_MOST_VALUES, _MOST_LEVELS = 8_000_000, 50  # of a JSON file
TRAINER = Path(__file__).resolve().parents[1]
PACKAGE = TRAINER.name.removesuffix("_trainer")  # the user's


def sources() -> Path:
    """Folder of the user's package; the trainer is beside it, or was installed from a wheel."""
    if TRAINER.with_name(PACKAGE).is_dir() or (spec := importlib.util.find_spec(PACKAGE)) is None:
        return TRAINER.parent
    return Path(spec.origin or TRAINER).resolve().parents[1]


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
        with contextlib.suppress(OSError):  # must not replace the error
            beside.unlink(missing_ok=True)


@contextlib.contextmanager
def synced(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file to write in this context; after it the file is on its disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file atomically: a reader sees the old or the new content."""
    with replacing(path) as beside, synced(beside, mode) as file:
        file.write(text.encode())


def write_first(path: Path, text: str) -> None:
    """Write a text file atomically unless it exists."""
    with contextlib.suppress(FileExistsError), replacing(path) as beside:
        write_atomically(beside, text)
        if not _link(beside, path) and path.exists():  # no hard links: two at once may both write
            raise FileExistsError(path)
        # A link is then replaced by itself.


def check_private(folder: Path) -> None:
    """Raise UserError if others than this user can open a folder."""
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not is_private or status.st_uid != os.geteuid():
        raise UserError(f"{folder} is not a folder that only this user can open; set TMPDIR")


@contextlib.contextmanager
def optional(line: str) -> Iterator[None]:
    """An OSError ends this context with a note, once in a process; ``{}`` in it is the reason."""
    try:
        yield
    except OSError as error:
        output.print_once(f"note: {line.format(error.strerror)}")


def sync(folder: Path) -> None:
    """Have the names in a folder written to its disk."""
    with optional("folders cannot be synced here ({}): a power cut may lose the newest checkpoint"):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def copy(source: Path, target: Path) -> None:
    """Make a file another name of one that is not written any more; or copy it."""
    if not _link(source, target):
        with source.open("rb") as original, synced(target, source.stat().st_mode & 0o777) as file:
            shutil.copyfileobj(original, file)


def _link(source: Path, target: Path) -> bool:
    """Make a hard link; whether this file system has them. FileExistsError: there is a target."""
    try:
        os.link(source, target)
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise
        return False
    return True


def discard(path: Path) -> None:
    """Remove a file, or a folder with all in it, which nobody sees half removed.

    What the file system does not remove, for example what NFS keeps of open files, stays hidden.
    """
    with contextlib.suppress(FileNotFoundError):
        if not path.is_dir() or path.is_symlink():
            path.unlink()
            return
        if not path.name.startswith("."):
            path = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(8)}"))
        shutil.rmtree(path, ignore_errors=True)


def point(link: Path, target: Path) -> None:
    """Make a relative symbolic link, or a file with the path; it replaces an older one at once."""
    path = target.relative_to(link.parent)
    if link.is_dir() and not link.is_symlink():  # the run was copied by its contents
        discard(link)
    lost = optional(f"{link.name} cannot be written ({{}}): it may be of an earlier step")
    with lost, replacing(link) as beside:
        with optional("links cannot be made here ({}): files with their paths are written"):
            beside.symlink_to(path)
        if not beside.is_symlink():
            beside.write_bytes(os.fsencode(f"{path}\n"))


def pointed(link: Path) -> Path:
    """What a link points to, or a file that :func:`point` has written instead; else the path."""
    if not link.is_symlink() and link.is_file() and link.stat().st_size < _LONGEST_PATH:
        path = os.fsdecode(link.read_bytes()).strip()
        with contextlib.suppress(OSError, ValueError):  # any file may be here: it is no path
            return link.parent / path if path and (link.parent / path).is_dir() else link
    return link.resolve() if link.is_symlink() else link


# --- small files that others may have written, cut or replaced ------------------------------------


def is_replaced(descriptor: int, path: Path) -> bool:
    """Whether a path is not the file that is open; False where that is not known."""
    try:
        return not os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        return isinstance(error, FileNotFoundError)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file; ValueError if it is something else."""
    # A pipe without a writer would wait, and a device may have no end.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        yield file


def read(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes, also unpacked; else ValueError."""
    with opened(path) as file:
        try:
            content = (GzipFile(fileobj=file) if path.suffix == ".gz" else file).read(most + 1)
        except (EOFError, zlib.error) as error:
            raise ValueError(f"is damaged: {error}") from None
    if len(content) > most:
        size = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise ValueError(f"larger than {size}")
    return content


def lines(path: Path, most: int) -> Iterator[str]:
    """The lines of a text file, at most ``most`` bytes of them; empty if cut, or above 64 KiB."""
    with opened(path) as file, io.TextIOWrapper(file, "utf-8", "replace", newline="\n") as text:
        while most > 0 and (line := text.readline(2**16)):
            most -= len(line)
            yield line if line.endswith("\n") else "\n"


def read_json(path: Path, most: int) -> Any:
    """The value in a JSON file of at most ``most`` bytes; raises as :func:`read`."""
    content = read(path, most)
    if content.count(b",") > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES:,} values")
    try:
        value = json.loads(content)
    except RecursionError:
        return refuse_deep(None, 0)
    refuse_deep(value)
    return value


def refuse_deep(value: Any, levels: int = _MOST_LEVELS) -> None:
    """Raise ValueError if a value of JSON is nested so deep that it cannot be written again."""
    if not levels:
        raise ValueError(f"nested more than {_MOST_LEVELS} levels deep")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            refuse_deep(item, levels - 1)
