"""Marks the tests that CI runs once a week, which tests/weekly.txt names: a plugin of pytest."""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def named() -> list[str]:
    """The lines of the list: a file, and the begin of a test's name."""
    lines = (TESTS / "weekly.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before ``-m`` selects."""
    begins = tuple(named())
    for item in items:
        test = item.nodeid.partition("::")[2]
        if item.path.is_relative_to(TESTS) and (
            f"{item.path.relative_to(TESTS).as_posix()}::{test}".startswith(begins)
        ):
            item.add_marker(pytest.mark.exhaustive)
