"""Settings of all tests, and the table of conformance after them."""

import re
from collections.abc import Mapping
from typing import Any

import hypothesis
import pytest

# How long an example takes says something of the machine, not of the code.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share what they have prepared, and so do those of a row of the matrix."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFileAndRow(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            row = re.search(r"\[([^-]+-\d+)[-\]]", test) if "conformance" in file else None
            return f"{file} {row[1]}" if row else file

    return ByFileAndRow(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A row a strategy and launch, a column a property."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", []):
            if name == "conformance" and report.when == "call":
                strategy, launch, column, cell = value
                cells.setdefault((strategy, launch), {})[column] = cell
    if not cells:
        return
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    terminalreporter.section("largest difference from one process")
    for line in table(cells, columns):
        terminalreporter.line(line)


def table(cells: Mapping[tuple[str, str], Mapping[str, str]], columns: list[str]) -> list[str]:
    """The table's lines, in Markdown."""
    lines = [
        "| strategy | nodes x devices | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for (strategy, launch), row in sorted(cells.items()):
        found = " | ".join(row.get(column, "") for column in columns)
        lines.append(f"| {strategy} | {launch} | {found} |")
    return lines
