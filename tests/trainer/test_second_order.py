"""Gradients of gradients are right, or refused where they are called."""

from pathlib import Path

import pytest

from test_elementwise import fitted, weights

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
TRAINED = ("tensor, of another layer", "tensor, none", "sync_batchnorm")


def test_gradients_of_gradients_are_right_or_refused(tmp_path: Path) -> None:
    found = fitted("penalty_subject", tmp_path, 2, *TRAINED, "tensor")
    (line,) = found.pop("tensor").splitlines()
    assert line.startswith("create_graph=True: the gradient of a gradient is not supported")
    assert found == dict.fromkeys(TRAINED, "")
    assert fitted("penalty_subject", tmp_path, 1, "alone") == {"alone": ""}
    difference = weights(tmp_path, "sync_batchnorm") - weights(tmp_path, "alone")
    assert float(difference.abs().max()) < 1e-5
