"""Weights after a fit that leaves parts of them, and random numbers of an optimizer's own step."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.project import run

from processes import at_root
from test_user_changes import TORCHRUN

pytestmark = pytest.mark.timeout(600)
STAGE_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
LEFT = "the program uses weights that are not whole in this process after the fit"


def fitted(folder: Path, optimizer: str, ranks: int = 2, **options: Any) -> list[dict[str, Any]]:
    by = TORCHRUN if ranks == 2 else ()
    words = [*by, "-m", "after_fit_subject", folder, json.dumps(options), optimizer]
    done = run(words, cwd=folder, extra=at_root())
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp",
        "sequential",
        "tensor_parallel",
        pytest.param("deepspeed", marks=pytest.mark.needs("deepspeed")),
    ],
)
def test_weights_of_which_a_fit_leaves_parts_are_an_error_on_every_rank(
    tmp_path: Path, strategy: str
) -> None:
    options = {"config": STAGE_3} if strategy == "deepspeed" else {}
    found = fitted(tmp_path, "SGD", strategy=strategy, strategy_options=options)
    assert [each["fit"] for each in found] == ["", ""]
    for each in found:
        assert all(error.startswith(LEFT) for error in each["errors"].values()), each["errors"]
    again = "" if strategy == "deepspeed" else "create it again, and give a checkpoint"
    assert all(again in each["again"] for each in found)


def test_an_optimizer_that_draws_noise_steps_replicas_alike(tmp_path: Path) -> None:
    (alone,) = fitted(tmp_path, "Noisy", ranks=1)
    found = fitted(tmp_path, "Noisy", strategy="ddp", run_name="ddp")
    assert not any(alone["errors"].values())
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["weights"] == pytest.approx(alone["weights"], abs=1e-6)
    fitted(tmp_path, "Noisy", strategy="ddp", run_name="parts", max_steps=2)
    resumed = fitted(tmp_path, "Noisy", strategy="ddp", run_name="parts", resume="auto")
    assert resumed == found
    options = {"devices": 2, "run_name": "shards"}
    for each in fitted(tmp_path, "Noisy", strategy="fsdp", **options):  # the scale is whole
        assert each["fit"].startswith("Noisy.step draws random numbers")
