"""What the emulated GPU counts, by source line."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
from tests.project import PACKAGE, ROOT

_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__).parent
_OWN = ("emulated_counts.py", "emulated_gpu.py")


@dataclass
class Counts:
    """How often each source line made the host wait, and copied from pageable memory.

    ``operators``: how often each ran, by name. A line is ``file:number`` of the package or the
    tests; what torch's own code waits for has its file after ``<``; what runs in backward is
    ``backward``.
    """

    waits: Counter[str] = field(default_factory=Counter)
    pageable: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)


_counts: list[Counts] = []


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    counts = Counts()
    _counts.append(counts)
    try:
        yield counts
    finally:
        _counts.remove(counts)


def note_operator(name: str) -> None:
    for count in _counts:
        count.operators[name] += 1


def note(kind: Literal["waits", "pageable"], what: str) -> None:
    """Count what the running line of the package or the tests does."""
    if _counts:
        line = f"{what} at {_line()}"
        for count in _counts:
            getattr(count, kind)[line] += 1


def _line() -> str:
    """The innermost line of the package or the tests, and the file of torch's that it called."""
    inside = ""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        shown = _shown(path)
        if shown is not None and path.name not in _OWN:
            return f"{shown}:{frame.f_lineno}{inside}"
        if not inside and path.is_relative_to(_TORCH) and path.name[0] != "_":
            inside = f" < torch/{path.relative_to(_TORCH).as_posix()}"
        frame = frame.f_back
    return "backward"


def _shown(path: Path) -> str | None:
    """A file's path in the package, or its name here; ``None`` for files of others."""
    for folder in (ROOT / "src" / f"{PACKAGE}_trainer", _HERE):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return None
