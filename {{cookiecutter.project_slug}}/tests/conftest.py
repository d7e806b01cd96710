"""Settings of all tests, and the table of conformance after them."""

from typing import Any

import hypothesis

# How long an example takes says something of the machine, not of the code.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A row a strategy and number of processes, a column a property."""
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", []):
            if name == "conformance" and report.when == "call":
                strategy, processes, column, cell = value
                cells.setdefault((strategy, processes), {})[column] = cell
    if not cells:
        return
    columns = list(next(iter(cells.values())))
    terminalreporter.section("largest difference from one process")
    terminalreporter.line("| strategy | processes | " + " | ".join(columns) + " |")
    terminalreporter.line("|---" * (len(columns) + 2) + "|")
    for (strategy, processes), row in sorted(cells.items()):
        found = " | ".join(row.get(column, "") for column in columns)
        terminalreporter.line(f"| {strategy} | {processes} | {found} |")
