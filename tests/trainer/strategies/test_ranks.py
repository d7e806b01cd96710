"""What is the same on two ranks from the first step on, and what differs."""

import json
from pathlib import Path
from typing import Any

import pytest
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.checkpoint.run_directory import complete
from safetensors.torch import load_file
from tests.conformance.horovod_rows import horovodrun
from tests.project import succeed

from fitting import logged

STRATEGIES = ["ddp", "ddp-manual", "fsdp", "ddp_zero1"]


class Results:
    def __init__(self, folder: Path, printed: str) -> None:
        self.folder, self.printed = folder, printed

    def seen(self, strategy: str) -> list[dict[str, Any]]:
        paths = (self.folder / f"{strategy}-{rank}.json" for rank in range(2))
        return [json.loads(path.read_text()) for path in paths]

    def logged(self, strategy: str, name: str) -> list[float]:
        return logged(self.folder / strategy, name)

    def newest(self, strategy: str) -> Path:
        return complete(self.folder / strategy / "checkpoints")[-1]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    return Results(folder, succeed(["-m", "ranks_subject", folder, *STRATEGIES]).stdout)


def assert_rank_0_s(results: Results, strategy: str) -> None:
    """All weights and buffers are those of rank 0, on every rank and in the checkpoint."""
    assert [rank["started with"] for rank in results.seen(strategy)] == [[1.0], [1.0]]
    model = Checkpoint(results.newest(strategy)).state()["model"]
    weights = {name: value.unique().tolist() for name, value in model.items() if name != "scale"}
    assert list(weights.values()) == [[1.0]] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_start_with_the_weights_of_rank_0(results: Results, strategy: str) -> None:
    assert_rank_0_s(results, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_evaluate_with_the_buffers_of_rank_0(results: Results, strategy: str) -> None:
    evaluated = [set(rank["evaluated"]) for rank in results.seen(strategy)]
    # Rank 1 has no sample. It runs the step all the same if parameters are sharded.
    assert evaluated == [{1.0}, {1.0} if strategy == "fsdp" else set()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_draws_different_random_numbers(results: Results, strategy: str) -> None:
    first, second = (rank["drawn"] for rank in results.seen(strategy))
    assert first != second


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_are_reduced_over_ranks_and_over_one_without_samples(results, strategy):
    assert set(results.logged(strategy, "low_step")) == {1.0}
    assert results.logged(strategy, "high_step") == [2.0, 2.0, 1.0]
    assert results.logged(strategy, "low_epoch") == [1.0]
    assert results.logged(strategy, "high_epoch") == [2.0]
    assert results.logged(strategy, "val_low") == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_padding_batch_counts_in_no_value(results: Results, strategy: str) -> None:
    for name, value in {"metric": 9.0, "sum": 9.0, "mean": (5 + 4 * 2) / 9}.items():
        assert results.logged(strategy, name) == [pytest.approx(value)], name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_after_validation_counts_each_rank_once(results: Results, strategy: str) -> None:
    """Also one that has read no batch, and so has logged nothing before."""
    assert results.logged(strategy, "val_ranks") == [1.5, 1.5, 1.5]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_s_hooks_get_what_its_step_returned(results: Results, strategy: str) -> None:
    for rank, seen in enumerate(results.seen(strategy)):
        # All weights and inputs are 1: the first layer gives 3, the last one 13.
        assert seen["outputs"] == [[[14.0 + rank] * 2], ["a"], [False, False]]


def test_rank_0_prints_to_the_terminal_and_the_others_into_their_files(results: Results) -> None:
    assert results.printed.count("printed by rank 0\n") == len(STRATEGIES)
    assert "printed by rank 1" not in results.printed
    for strategy in STRATEGIES:
        log = results.folder / strategy / "logs" / "rank-1.log"
        assert log.read_text().count("printed by rank 1\n") == 1


def test_gloo_uses_the_loopback_interface(results: Results) -> None:
    assert {rank["interface"] for rank in results.seen("ddp")} <= {"lo", "lo0"}


def held(results: Results, strategy: str, word: str) -> list[dict[str, int]]:
    """Elements of each tensor in the file of each rank, by name."""
    files = [results.newest(strategy) / f"rank-{rank:05d}.safetensors" for rank in range(2)]
    states = [load_file(file).items() for file in files]
    return [{name: value.numel() for name, value in state if word in name} for state in states]


def test_each_rank_steps_and_saves_its_share_of_the_optimizer_s_state(results: Results) -> None:
    first, second = held(results, "ddp_zero1", "exp_avg_sq")
    assert not first.keys() & second.keys()
    assert min(len(first), len(second)) > 0
    assert sum((first | second).values()) == 22


@pytest.mark.slow
@pytest.mark.needs("horovod")
def test_horovod_s_ranks_start_with_the_weights_of_rank_0(tmp_path: Path) -> None:
    done = succeed(["-m", "ranks_subject", tmp_path, "horovod"], by=horovodrun(2))
    assert_rank_0_s(Results(tmp_path, done.stdout), "horovod")
