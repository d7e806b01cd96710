"""Prints the time of each file of tests after them: a plugin of pytest."""

from collections import Counter
from typing import Any

import pytest

_MOST_FILES = 30


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The slowest files, each with the sum of its tests' times."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest {_MOST_FILES} files")
    for file, total in seconds.most_common(_MOST_FILES):
        terminalreporter.line(f"{total:7.1f} s  {file}")
