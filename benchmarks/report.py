"""Writes measurements into the pages of docs/: between the marks of each section only."""

import argparse
import contextlib
import datetime
import os
import platform
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
# Of each page, the sections that a benchmark writes.
SECTIONS = {
    "benchmarks": ("machine", "mlp", "transformer", "ranks"),
    "memory": ("machine", "tables", "left out"),
    "pipeline": ("machine", "waiting", "memory"),
    "checkpoints": ("machine", "large", "many", "stalls"),
    "scale": ("machine", "starts", "operations", "growth", "order"),
    "gpu": ("bench-gpu",),
}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have."""
    common = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_argument("--quick", action="store_true", help="a smoke run, which writes nothing")
    common.add_argument("--out", type=writable, default=DOCS, help="folder of the page")
    return common


def writable(name: str) -> Path:
    """Return the folder of that name, a type for argparse; refuse one that cannot be written to."""
    folder = Path(name)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name!r}; create it first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder {name!r} cannot be written to")
    return folder


class Page:
    """A page of docs/, whose sections are written; in another folder it begins as a copy.

    A page without the marks of a section is refused before anything is measured.
    """

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.is_smoke: bool = options.quick
        self.path: Path = options.out / f"{name}.md"
        self.sections = SECTIONS[name]
        source = self.path if self.path.exists() else DOCS / self.path.name
        self.text = source.read_text(encoding="utf-8")
        for begin, end in map(marks, self.sections):
            if begin not in self.text or end not in self.text.partition(begin)[2]:
                raise SystemExit(f"{source} has no lines {begin.strip()} and {end.strip()}")

    def publish(self, sections: Mapping[str, str], picture: str = "") -> None:
        """Print the sections; unless it is a smoke run, write them, and the picture beside them."""
        print("\n\n".join(sections.values()))
        if self.is_smoke:
            return
        for name in self.sections:
            begin, end = marks(name)
            before, _, rest = self.text.partition(begin)
            section = sections.get(name, "Not measured.").strip()
            self.text = f"{before}{begin}{section}\n{end}{rest.partition(end)[2]}"
        self.path.write_text(self.text, encoding="utf-8")
        if picture:
            self.path.with_suffix(".svg").write_text(picture, encoding="utf-8")


def marks(section: str) -> tuple[str, str]:
    """Return the lines before and after a section."""
    return f"<!-- {section}: begin -->\n", f"<!-- {section}: end -->\n"


def machine(*packages: str, device: str = "", more: str = "") -> str:
    """Return when and on what this was measured, and the versions of packages that are there."""
    facts = [f"{datetime.date.today()}", device or f"{os.cpu_count()} cores ({platform.machine()})"]
    facts.append(f"Python {platform.python_version()}")
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts.append(f"{name} {metadata.version(name)}")
    text = f"{', '.join(facts)}. {more}".strip()
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; columns may have no heading."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    first = f"| {' | '.join(head)} |".replace("|  |", "| |")
    return "\n".join([first, "|---" * len(head) + "|", *lines])


def bold(text: str, is_bold: bool) -> str:
    """Return a value, bold where it misses its target."""
    return f"**{text}**" if is_bold else text
