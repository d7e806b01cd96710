"""Random numbers of an optimizer's own step."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from my_project_trainer.errors import UserError
from my_project_trainer.strategies.engine_optimizers import drawing_nothing
from tests.project import run

from processes import at_root
from test_user_changes import TORCHRUN

pytestmark = pytest.mark.timeout(600)


def fitted(folder: Path, ranks: int = 2, **options: Any) -> list[dict[str, Any]]:
    by = TORCHRUN if ranks == 2 else ()
    words = [*by, "-m", "noise_subject", folder, json.dumps(options)]
    done = run(words, cwd=folder, extra=at_root())
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_an_optimizer_that_draws_noise_steps_replicas_alike(tmp_path: Path) -> None:
    (alone,) = fitted(tmp_path, ranks=1)
    found = fitted(tmp_path, strategy="ddp", run_name="ddp")
    assert alone["fit"] == ""
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["weights"] == pytest.approx(alone["weights"], abs=1e-6)
    fitted(tmp_path, strategy="ddp", run_name="parts", max_steps=2)
    resumed = fitted(tmp_path, strategy="ddp", run_name="parts", resume="auto")
    assert resumed == found
    options = {"devices": 2, "run_name": "shards"}
    for each in fitted(tmp_path, strategy="fsdp", **options):  # the scale is whole
        assert each["fit"].startswith("Noisy.step draws random numbers")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("draw", [lambda: torch.rand(1), np.random.rand, random.random, None])
def test_a_draw_from_any_generator_is_noticed(
    monkeypatch: pytest.MonkeyPatch, device: str, draw: Callable[[], object] | None
) -> None:
    states = iter(range(2))  # of a GPU's generator, which moves if nothing else does
    module = SimpleNamespace(get_rng_state=lambda _: torch.tensor(next(states) * (draw is None)))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    if draw is None and device == "cpu":
        with drawing_nothing(optimizer, torch.device(device)):
            pass
        return
    refused = pytest.raises(UserError, match=r"SGD\.step draws random numbers")
    with refused, drawing_nothing(optimizer, torch.device(device)):
        (draw or int)()
