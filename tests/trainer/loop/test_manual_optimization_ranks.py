"""Manual optimization on two processes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_manual_optimization import fit, weights
from tests.conformance.rows import ROUNDING
from tests.project import missing, require, succeed

from fitting import assert_close, saved
from manual_subject import Accumulates, ByHand, Clips


def train(processes: int, folder: Path, *options: str | Path) -> None:
    succeed(["-m", "manual_subject", str(processes), folder, *options])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory):
    """What two ranks saw, by the name of a model."""
    folder = tmp_path_factory.mktemp("manual")
    train(2, folder)
    return lambda name: [load_file(folder / f"{name}.{rank}") for rank in range(2)]


def test_two_processes_compute_what_one_does(ranks, tmp_path):
    fit(alone := ByHand(batch_size=16), tmp_path)
    for rank in ranks("Accumulates"):
        for name, weight in weights(alone).items():
            torch.testing.assert_close(rank[name], weight, rtol=0, atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded", "fsdp"])
def test_two_processes_clip_as_one_does(tmp_path, strategy):
    if strategy == "ddp_sharded":
        require(missing("fairscale"))
    train(2, tmp_path / "run", "--only", "Clips", "--strategy", strategy)
    (directory,) = (tmp_path / "run" / "Clips").iterdir()
    fit(alone := Clips(batch_size=16), tmp_path / "alone")
    fit(free := ByHand(batch_size=16), tmp_path / "free")
    assert_close(saved(directory), weights(alone))
    for name, weight in weights(alone).items():
        assert not weight.allclose(weights(free)[name], atol=1e-4)


@pytest.mark.parametrize("name", ["network", "other"])
def test_nothing_is_sent_before_the_backward_that_synchronizes(ranks, name):
    one, two = ranks("Watches")
    assert [int(one[f"{batch}.{name}.collectives"]) for batch in range(2)] == [0, 2]
    suffix = f"gradient.{name}."
    keys = [key for key in one if key.startswith(f"0.{name}.{suffix}")]
    assert keys
    for key in keys:
        assert not one[key].equal(two[key])
        after = key.replace("0.", "1.", 1)
        assert one[after].equal(two[after])


def test_what_was_accumulated_is_averaged_when_its_own_backward_synchronizes(ranks):
    one, two = ranks("Watches")
    # While the first network synchronizes, the second keeps what it has.
    for rank in (one, two):
        for parameter in ("weight", "bias"):
            kept = rank[f"1.network.gradient.other.{parameter}"]
            assert kept.equal(rank[f"0.other.gradient.other.{parameter}"])
    first = (one["0.other.gradient.other.bias"] + two["0.other.gradient.other.bias"]) / 2
    assert not one["1.other.gradient.other.bias"].equal(first)
    assert not one["0.other.gradient.other.bias"].equal(two["0.other.gradient.other.bias"])


def test_a_parameter_that_one_rank_alone_used_is_averaged_on_both(ranks):
    one, two = ranks("Unused")
    for rank in (one, two):
        torch.testing.assert_close(rank["0.part"], one["0.alone"] / 2)
        # In a batch that did not synchronize, and by nobody in the one that did.
        torch.testing.assert_close(rank["2.part"], two["1.alone"] / 2)
        assert rank["2.network"].equal(one["2.network"])
    assert "1.part" not in one
    assert two["1.part"].equal(two["1.alone"])


def test_gradients_that_were_given_up_are_not_averaged(ranks):
    for rank in ranks("Unused"):
        assert "3.part" in rank
        assert "4.part" not in rank


@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_what_is_frozen_stays_as_it_is_until_it_is_thawed(ranks, tmp_path, strategy):
    seen = ranks("Frozen")
    if strategy == "single_device":
        train(1, tmp_path, "--only", "Frozen")
        seen = [load_file(tmp_path / "Frozen.0")]
    start = weights(ByHand())["network.0.weight"]
    for rank in seen:
        assert rank["0.weight"].equal(start)
        assert not rank["2.weight"].equal(start)
        assert rank["2.weight"].equal(seen[0]["2.weight"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "ddp"), (1, "ddp")),
        *(
            pytest.param(before, after, marks=pytest.mark.slow)
            for before, after in (
                ((1, "ddp"), (2, "ddp")),
                ((2, "fsdp"), (1, "ddp")),
                ((2, "fsdp"), (4, "fsdp")),
                ((2, "ddp"), (2, "fsdp")),
            )
        ),
    ],
)
def test_accumulated_gradients_go_along_to_other_processes(tmp_path, before, after):
    """Stopped between two batches that are accumulated; each reads the same global batches."""
    only = ("--only", "Accumulates", "--global_batch_size", "8", "--strategy")
    train(before[0], tmp_path / "stopped", *only, before[1], "--max_steps", "3")
    stopped = next((tmp_path / "stopped" / "Accumulates").iterdir())
    train(after[0], tmp_path / "resumed", *only, after[1], "--resume", stopped)
    fit(large := Accumulates(), tmp_path / "whole", global_batch_size=8)
    assert_close(saved(stopped), weights(large))
