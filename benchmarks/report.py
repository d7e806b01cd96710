"""Writes measurements into the pages of docs/: between the marks of each part, and nowhere else."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Of each page, the parts that a benchmark writes.
PARTS = {
    "benchmarks": ("machine", "mlp", "transformer", "ranks", "render"),
    "memory": ("machine", "tables", "left out"),
    "pipeline": ("machine", "waiting", "memory"),
    "checkpoints": ("machine", "large", "many", "stalls"),
    "scale": ("machine", "starts", "operations", "growth", "server", "extrapolated", "order"),
    "gpu": ("bench-gpu",),
}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return what reads the options that all benchmarks have."""
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--quick", action="store_true", help="a smoke run, which writes nothing")
    found.add_argument("--out", type=writable, default=DOCS, help="folder of the page")
    return found


def writable(name: str) -> Path:
    """Return the folder of that name, a type for argparse; refuse one that cannot be written to."""
    folder = Path(name)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name!r}; create it first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder {name!r} cannot be written to")
    return folder


class Page:
    """A page of docs/, whose parts are written; in another folder it begins as a copy.

    A page without the marks of a part is refused before anything is measured.
    """

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.is_smoke: bool = options.quick
        self.path: Path = options.out / f"{name}.md"
        self.parts = PARTS[name]
        path = self.path if self.path.exists() else DOCS / self.path.name
        self.text = path.read_text(encoding="utf-8")
        for begin, end in map(marks, self.parts):
            if begin not in self.text or end not in self.text.partition(begin)[2]:
                raise SystemExit(f"{path} has no lines {begin.strip()} and {end.strip()}")

    def publish(self, parts: Mapping[str, str], picture: str = "") -> None:
        """Print the parts; unless it is a smoke run, write them, and the picture beside them."""
        print("\n\n".join(parts.values()))
        if self.is_smoke:
            return
        for part in self.parts:
            begin, end = marks(part)
            before, _, rest = self.text.partition(begin)
            own = parts.get(part, "Not measured.")
            self.text = f"{before}{begin}{own.strip()}\n{end}{rest.partition(end)[2]}"
        self.path.write_text(self.text, encoding="utf-8")
        if picture:
            self.path.with_suffix(".svg").write_text(picture, encoding="utf-8")


def marks(part: str) -> tuple[str, str]:
    """Return the lines before and after a part."""
    return f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->\n"


def machine(*packages: str, more: str = "") -> str:
    """Return when and where this was measured, and the versions of packages that are there."""
    python = f"Python {platform.python_version()}"
    where = f"{os.cpu_count()} cores ({platform.machine()})"
    return wrapped(
        ", ".join([f"{datetime.date.today()}", where, python, *versions(*packages)]) + f". {more}"
    )


def versions(*packages: str) -> list[str]:
    """Return the names and versions of those that are installed."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; columns may have no heading."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    first = f"| {' | '.join(head)} |".replace("|  |", "| |")
    return "\n".join([first, "|---" * len(head) + "|", *lines])


def bold(text: str, is_bold: bool) -> str:
    """Return a value, bold where it misses its target."""
    return f"**{text}**" if is_bold else text


def wrapped(text: str) -> str:
    """Return a paragraph in lines of at most 100 characters."""
    return textwrap.fill(text.strip(), 100, break_long_words=False, break_on_hyphens=False)
