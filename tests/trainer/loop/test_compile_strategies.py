"""Compiled steps compute under each strategy what they compute uncompiled."""

import json
from typing import Any

import pytest
from tests.conformance.rows import ROUNDING
from tests.project import succeed

SECONDS = 600.0
pytestmark = pytest.mark.timeout(2 * SECONDS)
UNITS = {"unit_classes": ["Block"]}
ALL = ("parts", "whole", "regional", "named")
# Devices, options of the strategy, and what is compiled, as in compile_subject.py.
RUNS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "single_device": (1, {}, ALL),
    "ddp": (2, {}, ALL),
    "fsdp": (2, UNITS, ALL),
    "hsdp": (4, {"shard_size": 2, **UNITS}, ("parts",)),
    "mesh": (2, {"data": 1, "shard": 2, **UNITS}, ("parts", "regional")),
    "mesh of replicas": (2, {"data": 2}, ("parts",)),
    "tensor_parallel": (2, {}, ALL),
    "mesh of tensors": (4, {"data": 1, "shard": 2, "tensor": 2, **UNITS}, ("regional",)),
}
# What "fsdp", "tensor_parallel" and "mesh of tensors" cover together.
COVERED = {"hsdp", "mesh", "mesh of replicas"}
NAMES = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in COVERED)) for name in RUNS]


def losses_and_weights(folder, name, backend, ways=()) -> dict[str, Any]:
    """Of each way; the last line of what the main rank prints."""
    devices, strategy_options, default = RUNS[name]
    ways = ways or ("none", *default)
    options = json.dumps({"strategy_options": strategy_options or None})
    words = [str(devices), name.split()[0], options, backend, *ways]
    done = succeed(["-m", "compile_subject", folder, *words], timeout=SECONDS)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_step_equals_an_eager_one(tmp_path, name):
    # AOTAutograd traces as for inductor, and torch's eager kernels compute.
    results = losses_and_weights(tmp_path, name, "aot_eager")
    eager = results.pop("none")
    assert list(results) == list(RUNS[name][2])
    for result in results.values():
        assert result.pop("graphs") > 0
        assert result["losses"] == pytest.approx(eager["losses"], abs=ROUNDING)
        assert result["validated"] == pytest.approx(eager["validated"], abs=ROUNDING)
        assert result["weights"] == pytest.approx(eager["weights"], abs=ROUNDING)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.needs("g++")
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_inductor_s_kernels_equal_eager_ones(tmp_path, name):
    results = losses_and_weights(tmp_path, name, "inductor")
    eager = results.pop("none")
    for result in results.values():
        # Kernels that are fused differently add in another order: some last digits of float32.
        assert result["losses"] == pytest.approx(eager["losses"], rel=1e-5)
        assert result["weights"] == pytest.approx(eager["weights"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.needs("g++")
def test_no_rank_loads_the_compiled_backward_of_another(tmp_path, monkeypatch):
    # Ranks take other slices of a DTensor in backward, and torch's cache does not know it.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    ways = ("sliced-none", "sliced", "sliced-again")
    results = losses_and_weights(tmp_path, "tensor_parallel", "inductor", ways)
    eager, first, again = (results[way] for way in ways)
    assert again["loaded"] > first["loaded"]
    for result in (first, again):
        assert result["losses"] == pytest.approx(eager["losses"], rel=1e-5)
        assert result["weights"] == pytest.approx(eager["weights"], rel=1e-5)
