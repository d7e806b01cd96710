"""The conformance tests detect a strategy that computes something else than one process does."""

from pathlib import Path

import pytest
from tests.conformance.rows import PROPERTIES
from tests.conformance.test_conformance import difference
from tests.project import succeed

from faulty_strategies import CLIPPED, PAIRS, PROCESSES, WAYS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights and losses of each fault, and those of one process."""
    folder = tmp_path_factory.mktemp("faults")
    count = str(PROCESSES)
    ways = (*WAYS, *CLIPPED)
    reference = ["-m", "tests.conformance.worker", folder, "reference", count, count, *ways]
    for arguments in (reference, ["-m", "faulty_strategies", folder]):
        succeed(arguments)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "way"), PAIRS)
def test_a_deliberate_error_is_detected(results, fault, way):
    distance = difference(results / fault / f"{way}.safetensors", results / f"{way}.safetensors")
    assert distance > 20 * PROPERTIES[way].tolerance
