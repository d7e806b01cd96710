"""Writes each strategy's part of the tables in docs/evidence.md into its page of a project.

`make tables` runs this file; test_docs.py fails where a page is not up to date. A page names what
it holds: ``<!-- conformance: ddp; ddp, PowerSGD: begin -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
EVIDENCE = ROOT / "docs" / "evidence.md"
PAGES = ROOT / "{{cookiecutter.project_slug}}" / "docs" / "strategies"
MARKED = re.compile(r"<!-- conformance: (.*): begin -->\n.*?<!-- conformance: end -->", re.DOTALL)

Launches = dict[str, dict[str, str]]  # "2" or "2 x 2" devices: a cell for each configuration


def cells(line: str) -> list[str]:
    """Return the cells of a row of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def measured() -> dict[str, Launches]:
    """Return what was measured: by the name of a row, its launches, and their configurations."""
    launches: dict[str, Launches] = {}
    text = EVIDENCE.read_text(encoding="utf-8")
    for mark in ("conformance", "conformance of xla"):
        table = text.split(f"<!-- {mark}: begin -->\n")[1].split(f"<!-- {mark}: end -->")[0]
        lines = table.strip().splitlines()
        names = cells(lines[0])[2:]
        for row in map(cells, lines[2:]):
            launches.setdefault(row[0], {})[row[1]] = dict(zip(names, row[2:], strict=True))
    return launches


def table(rows: list[str]) -> str:
    """Return one line for each configuration, one column for each launch of these rows."""
    columns = {
        f"{name}, {launch}": results
        for name in rows
        for launch, results in measured()[name].items()
    }
    lines = [
        "| | " + " | ".join(f"`{name}`" for name in columns) + " |",
        "|---" * (len(columns) + 1),
    ]
    lines[1] += "|"
    names = list(dict.fromkeys(name for results in columns.values() for name in results))
    for name in names:
        line = [results.get(name, "") for results in columns.values()]
        if any(line):
            lines.append(f"| {name} | " + " | ".join(line) + " |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return a page with its tables regenerated."""
    return MARKED.sub(
        lambda found: (
            f"<!-- conformance: {found[1]}: begin -->\n\n"
            f"{table(found[1].split('; '))}\n\n<!-- conformance: end -->"
        ),
        text,
    )


def pages() -> dict[Path, str]:
    """Return the pages that hold a table, as they must be."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PAGES.rglob("*.md"))}
    return {path: page(text) for path, text in texts.items() if MARKED.search(text)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
