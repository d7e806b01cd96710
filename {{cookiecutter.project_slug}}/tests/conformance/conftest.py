"""Time for the workers."""

import pytest


@pytest.fixture(autouse=True)
def _enough_time(request: pytest.FixtureRequest) -> None:
    """A worker trains in every way of the matrix: more than a single test may take."""
    request.node.add_marker(pytest.mark.timeout(1000))
