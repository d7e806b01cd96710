"""Gradients of gradients are right, or refused where they are called."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.checkpoint import reading
from tests.project import run

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
TRAINED = ("tensor, of another layer", "tensor, none", "sync_batchnorm")


def fitted(folder: Path, devices: int, *names: str) -> dict[str, str]:
    """The errors of fits; "" for those that train."""
    done = run(["-m", "penalty_subject", folder, str(devices), *names])
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def weights(folder: Path, name: str) -> torch.Tensor:
    state: Any = reading.Checkpoint(reading.resolve(folder / name)).state()
    return torch.cat([state["model"][key].flatten().double() for key in sorted(state["model"])])


def test_gradients_of_gradients_are_right_or_refused(tmp_path: Path) -> None:
    found = fitted(tmp_path, 2, *TRAINED, "tensor")
    (line,) = found.pop("tensor").splitlines()
    assert line.startswith("create_graph=True: the gradient of a gradient is not supported")
    assert found == dict.fromkeys(TRAINED, "")
    assert fitted(tmp_path, 1, "alone") == {"alone": ""}
    difference = weights(tmp_path, "sync_batchnorm") - weights(tmp_path, "alone")
    assert float(difference.abs().max()) < 1e-5
