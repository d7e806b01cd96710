"""Skips the checks of this folder where there is no GPU."""

import pytest

from . import device


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip with the reason; in CI too, which need not have a GPU."""
    reason = device.missing()
    if reason is not None:
        pytest.skip(reason)
