"""Settings of all tests, and the table of conformance after them."""

from collections.abc import Mapping
from typing import Any

import hypothesis
import pytest

# How long an example takes says something of the machine, not of the code.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests share what they have prepared, so they run in one process."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


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
