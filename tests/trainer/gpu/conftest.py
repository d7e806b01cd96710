"""Skips the checks of this folder where there is no GPU, as the project's own are skipped."""

from tests.gpu.conftest import pytest_runtest_setup

__all__ = ["pytest_runtest_setup"]
