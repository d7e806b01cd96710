"""Settings of all tests, and the table of conformance after them."""

import importlib.util
import re
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from .project import missing, require

# A shell has what it starts in the background ignore Ctrl-C, and all that this starts would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What tests record by these names, as a row's labels, a column and a cell; the table's title, and
# what its labels are.
TABLES = {
    "conformance": ("largest difference from one process", ["strategy", "nodes x devices"]),
    "portability": (
        "largest difference from one process, after going on from another's checkpoint",
        ["saved by"],
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """One set of fork servers for all workers of a run of the tests, if the project has them."""
    if not importlib.util.find_spec("tests.fork_server"):
        return
    from . import fork_server

    is_first = not hasattr(config, "workerinput") and not fork_server.is_serving()
    if is_first and not config.option.collectonly:
        from .conformance.matrix import ENGINES  # imports torch, which only a run of tests needs

        servers = fork_server.serving(ENGINES)
        servers.__enter__()
        config.add_cleanup(lambda: servers.__exit__(None, None, None))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that needs what is not installed is skipped with the reason; in CI it fails."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            require(missing(name))


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
    """The tables that tests have recorded cells of."""
    for name, (title, heads) in TABLES.items():
        cells: dict[tuple[str, ...], dict[str, str]] = {}
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
            for key, value in getattr(report, "user_properties", []):
                if key == name and report.when == "call":
                    *row, column, cell = value
                    cells.setdefault(tuple(row), {})[column] = cell
        if cells:
            terminalreporter.section(title)
            for line in table(heads, cells):
                terminalreporter.line(line)


def table(heads: list[str], cells: Mapping[tuple[str, ...], Mapping[str, str]]) -> list[str]:
    """The table's lines, in Markdown."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    lines = [f"| {' | '.join([*heads, *columns])} |", "|---" * (len(heads) + len(columns)) + "|"]
    for labels, row in sorted(cells.items()):
        values = [row.get(column, "") for column in columns]
        lines.append(f"| {' | '.join([*labels, *values])} |")
    return lines
