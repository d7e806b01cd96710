"""FairScale's strategies: what they keep, how they clip, and what they say where they cannot go on.

That they compute what one process computes is shown by the conformance matrix, and here for models
that are easily got wrong.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.project import missing, require, run

from fitting import saved
from processes import at_root

# Several trainings a test, of several processes each.
SHARDED = {"strategy": "ddp_sharded"}
LAYERS, LAYER = 4, 64  # of the subject Even
# CI leaves to make test-slow what one of a pair covers.
FOUR = pytest.param(4, marks=pytest.mark.exhaustive)
ON_TWO_AND_FOUR = pytest.mark.parametrize("devices", [2, FOUR])


def started(folder, subject, devices, **options) -> "subprocess.CompletedProcess[str]":
    """A fit of a subject, and tests of what came of it."""
    if options.get("strategy") is not None:
        require(missing("fairscale"))
    folder.mkdir(exist_ok=True)
    text = json.dumps({"devices": devices, "max_steps": 6, "global_batch_size": 4, **options})
    return run(["-m", "odd_subject", folder, subject, text], extra=at_root(), engine="fairscale")


def fitted(folder: Path, subject: str, devices: int, **options: Any) -> list[dict[str, Any]]:
    """What each rank has noted."""
    done = started(folder, subject, devices, **options)
    assert done.returncode == 0, done.stderr
    told = ("note: resumed from ", "note: saved by ")
    assert [line for line in done.stderr.splitlines() if not line.startswith(told)] == []
    return [json.loads((folder / f"notes-{rank}.json").read_text()) for rank in range(devices)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in saved(folder / "run").items()}


def difference(one: Path, other: Path) -> float:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    fitted(folder, "Odd", 1)
    return folder


@pytest.mark.slow
@ON_TWO_AND_FOUR
def test_a_model_that_is_easily_got_wrong(tmp_path, alone, devices):
    # On four ranks, each has one sample: gradients then lie in the memory of others.
    notes = fitted(tmp_path / "run", "Odd", devices, **SHARDED)
    assert difference(tmp_path / "run", alone) < 1e-5
    # The same process trains the module again.
    expected = json.loads((alone / "notes-0.json").read_text())["tested"]
    for rank in notes:
        assert rank["tested"] == pytest.approx(expected, abs=1e-5)
        assert rank["tested_from_checkpoint"] == rank["tested"]


@pytest.mark.slow
def test_a_layer_that_is_thawed_is_trained_from_then_on(tmp_path):
    epochs = {"max_epochs": 2, "max_steps": None}
    fitted(tmp_path / "alone", "Thawing", 1, **epochs)
    fitted(tmp_path / "run", "Thawing", 2, **epochs, **SHARDED)
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-5


@pytest.mark.slow
@ON_TWO_AND_FOUR
def test_each_rank_keeps_its_share_of_gradients_and_optimizer_states(tmp_path, devices):
    last = [rank["notes"][-1] for rank in fitted(tmp_path, "Even", devices, **SHARDED)]
    share = LAYERS * LAYER // devices
    assert [note["parameters"] for note in last] == [LAYERS * LAYER] * devices
    assert [note["gradients"] for note in last] == [share] * devices
    assert [note["state"] for note in last] == [2 * share] * devices  # Adam's two moments


@pytest.mark.slow
def test_the_norm_that_is_clipped_is_that_of_all_ranks_gradients(tmp_path):
    total, bound = fitted(tmp_path / "alone", "Even", 1)[0]["notes"][0]["norm"], 0.01
    notes = fitted(tmp_path / "run", "Even", 2, gradient_clip_val=bound, **SHARDED)
    unclipped = fitted(tmp_path / "unclipped", "Even", 2, **SHARDED)
    for ranks, norm in ((unclipped, total), (notes, bound)):
        shards = [rank["notes"][0]["norm"] for rank in ranks]
        assert all(0.05 * norm < shard < norm for shard in shards)
        assert sum(shard**2 for shard in shards) ** 0.5 == pytest.approx(norm, rel=1e-4)


@pytest.mark.slow
def test_a_rank_without_gradients_asks_the_others_for_overflows(tmp_path):
    notes = fitted(tmp_path, "Single", 2, precision="16-mixed", **SHARDED)
    assert notes[0]["tested"] == notes[1]["tested"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_checkpoint_goes_on_under_any_strategy_on_any_number_of_ranks(tmp_path):
    chain: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (2, SHARDED),
        (3, {"strategy": "fsdp"}),
        (4, SHARDED),
        (2, {"strategy": "ddp_zero1", "strategy_options": {"find_unused_parameters": True}}),
    ]
    resume: dict[str, Any] = {"global_batch_size": 12}
    for steps, (devices, options) in enumerate(chain, start=1):
        folder = tmp_path / str(steps)
        fitted(folder, "Odd", devices, **options, **resume, max_steps=2 * steps)
        resume["resume"] = str(folder / "run")
    fitted(tmp_path / "alone", "Odd", 1, global_batch_size=12, max_steps=2 * len(chain))
    assert difference(folder, tmp_path / "alone") < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        pytest.param("Twice", "layers.0.weight is in two optimizers", marks=pytest.mark.exhaustive),
        ("Double", "has parameters of torch.float32, torch.float64"),
        ("Changing", "side.weight was used in a micro-batch of this step but not in its"),
    ],
)
def test_says_what_it_would_compute_wrongly(tmp_path, subject, reason):
    accumulate = {"accumulate_grad_batches": 2} if subject == "Changing" else {}
    done = started(tmp_path, subject, 2, **SHARDED, **accumulate)
    assert done.returncode != 0
    assert reason in done.stderr
