"""Read small files that others may have written, cut or replaced."""

import contextlib
import io
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_MOST_VALUES, _MOST_LEVELS = 8_000_000, 50  # of a JSON file


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
        if path.suffix != ".gz":
            content = file.read(most + 1)
        else:
            import gzip

            try:
                with gzip.open(file) as unpacked:
                    content = unpacked.read(most + 1)
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
        found = json.loads(content)
    except RecursionError:
        return refuse_deep(None, 0)
    refuse_deep(found)
    return found


def refuse_deep(value: Any, levels: int = _MOST_LEVELS) -> None:
    """Raise ValueError if a value of JSON is nested so deep that it cannot be written again."""
    if not levels:
        raise ValueError(f"nested more than {_MOST_LEVELS} levels deep")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            refuse_deep(each, levels - 1)
