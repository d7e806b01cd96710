"""What only CUDA does across ranks, on emulated GPUs: dropout of DTensors."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.project import succeed

from emulated_ranks import RANKS, SAVED, STEPS

SECONDS = 600.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulated-ranks")
    succeed(["-m", "emulated_ranks", path], timeout=SECONDS)
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_masks_of_dtensors_differ_between_replicas_and_shards(ranks: list[dict[str, Any]]) -> None:
    steps = list(zip(*(rank["replicas"] for rank in ranks), strict=True))
    assert len(steps) == STEPS
    for one, two, three, four in steps:
        for name in ("replicated", "plain"):
            assert one[name] == two[name] != three[name] == four[name]
        for name in ("sharded", "inside"):
            assert len({tuple(masks[name]) for masks in (one, two, three, four)}) == RANKS
    assert steps[0][0] != steps[1][0]


def test_no_state_of_a_generator_is_broadcast(ranks: list[dict[str, Any]]) -> None:
    """Torch's own tracker broadcasts that of rank 0 to all replicas."""
    assert [rank["broadcasts"] for rank in ranks] == [0] * RANKS


def test_a_resume_draws_the_same_masks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resumed"] == rank["replicas"][SAVED:]
        assert rank["equal"]


def test_sharded_parameters_are_stepped_and_clipped_by_kernels_of_gpus(ranks):
    assert all("_fused_adamw_.default" in rank["operators"] for rank in ranks)
    # The ranks that hold a shard first count its norm.
    counting = ["_foreach_norm.Scalar" in rank["operators"] for rank in ranks]
    assert counting == [True, True, False, False]


def test_torch_is_left_as_it_was(ranks: list[dict[str, Any]]) -> None:
    assert [rank["left"] for rank in ranks] == ["None"] * RANKS
