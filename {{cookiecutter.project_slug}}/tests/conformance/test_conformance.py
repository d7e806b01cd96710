"""Each strategy computes what one process computes at the same global batch."""

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ..project import load, run
from .faults import FAULTS, FAULTY
from .matrix import MATRIX, PROPERTIES

strategies = load("trainer.strategies")

CASES = [
    (strategy, processes, name)
    for strategy, row in MATRIX.items()
    for processes in row.world_sizes
    for name in PROPERTIES
]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory):
    """Runs a strategy's worker once, and gives the folder that it wrote."""

    @cache
    def folder(strategy: str, processes: int) -> Path:
        path = tmp_path_factory.mktemp(f"{strategy}-{processes}-")
        done = run(["-m", "tests.conformance.worker", strategy, str(processes), path])
        assert done.returncode == 0, done.stderr
        return path

    return folder


def difference(one: Path, other: Path) -> float:
    """Largest difference of any weight or logged loss in two results."""
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    assert len(ours["losses"]) > 0
    return max(_distance(ours[key], theirs[key]) for key in ours)


def _distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())


def test_every_registered_strategy_has_a_row():
    assert set(strategies.names()) == set(MATRIX)


def test_a_strategy_without_a_row_is_noticed():
    strategies.register("unproven", strategies.SingleDevice)
    try:
        assert set(strategies.names()) != set(MATRIX)
    finally:
        del strategies._REGISTRY["unproven"]


@pytest.mark.parametrize(("strategy", "processes", "name"), CASES)
def test_equals_one_process(results, record_property, strategy, processes, name):
    reason = MATRIX[strategy].refused.get(name)
    if reason is not None:
        record_property("conformance", [strategy, processes, name, f"refused: {reason}"])
        return
    found = difference(
        results(strategy, processes) / f"{name}.safetensors",
        results("single_device", 1) / f"{name}.safetensors",
    )
    record_property("conformance", [strategy, processes, name, f"{found:.1e}"])
    assert found <= PROPERTIES[name].tolerance


@pytest.mark.parametrize(("strategy", "processes", "name"), CASES)
def test_resumes_to_the_last_bit(results, strategy, processes, name):
    if name in MATRIX[strategy].refused:
        return
    folder = results(strategy, processes)
    whole = load_file(folder / f"{name}.safetensors")
    resumed = load_file(folder / f"{name}-resumed.safetensors")
    stopped = load_file(folder / f"{name}-stopped.safetensors")
    assert len(stopped["losses"]) == 4
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("name", FAULTY)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_deliberate_fault_is_caught(results, fault, name):
    found = difference(
        results(fault, 2) / f"{name}.safetensors",
        results("single_device", 1) / f"{name}.safetensors",
    )
    assert found > 50 * PROPERTIES[name].tolerance
