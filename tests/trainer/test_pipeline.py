"""Pipelines compute what one process computes, and go on to the last bit."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.project import run

from pipeline_subject import CASES, PORTED, SAMPLES, STOP, dashed

# Dropout masks of micro-batches are other ones than those of a batch.
RANDOM = {"dropout"}
TRIED = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if case.exhaustive else [])
        for name, case in CASES.items()
    ],
)
pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """Trains a case and those that are started as it is, at once; gives the folder."""

    @cache
    def folder(processes: int, exhaustive: bool) -> Path:
        path = tmp_path_factory.mktemp("pipeline-")
        alike = (processes, exhaustive)
        names = [name for name, each in CASES.items() if (each.processes, each.exhaustive) == alike]
        for arguments in (names, ["alone", *names]):
            done = run(["-m", "pipeline_subject", path, *arguments], timeout=600)
            assert done.returncode == 0, done.stderr
        return path

    return folder


def results(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """What a run has written."""
    return load_file(folder / f"{dashed(name)}.safetensors")


@TRIED
def test_equals_one_process(trained, name):
    case = CASES[name]
    folder = trained(case.processes, case.exhaustive)
    ours, theirs = (
        results(folder, each) | results(folder, f"{each} evaluated")
        for each in (name, f"{name} alone")
    )
    assert ours.keys() == theirs.keys()
    assert len(ours["logged/loss"]) >= 6
    assert len(ours["predictions"]) == SAMPLES
    if name in RANDOM:
        return
    for key, value in ours.items():
        expected = theirs[key].double()
        difference = (value.double() - expected).abs().max()
        assert difference <= case.tolerance * max(1.0, expected.abs().max()), key


@TRIED
def test_resumes_to_the_last_bit(trained, name):
    folder = trained(CASES[name].processes, CASES[name].exhaustive)
    whole, resumed = results(folder, name), results(folder, f"{name} resumed")
    assert len(results(folder, f"{name} stopped")["logged/loss"]) == STOP
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_goes_on_with_other_stages_and_schedules_and_in_one_process(tmp_path):
    for name in PORTED:
        done = run(["-m", "pipeline_subject", tmp_path, "ported", name], timeout=600)
        assert done.returncode == 0, done.stderr
    whole = results(tmp_path, "whole")
    assert len(whole["logged/loss"]) > STOP == len(results(tmp_path, "stopped")["logged/loss"])
    for name in list(PORTED)[1:]:
        found = results(tmp_path, name)
        assert found.keys() == whole.keys()
        assert len(found["logged/loss"]) == len(whole["logged/loss"]) - STOP
        # Sums over micro-batches are the same, but not that of one process over a whole batch.
        tolerance = 2e-6 if name == "one" else 0.0
        # The mean of the epoch of the resume has its later steps only, with another layout.
        for key, value in found.items():
            if key.endswith("_epoch"):
                continue
            expected = whole[key][-len(value) :].double()
            difference = (value.double() - expected).abs().max()
            assert difference <= tolerance * max(1.0, expected.abs().max()), (name, key)


def test_weights_are_cast_once_for_all_micro_batches(tmp_path):
    done = run(["-m", "pipeline_subject", tmp_path, "casts"], timeout=600)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        counts = json.loads((tmp_path / f"casts-{rank}.json").read_text())
        assert len(counts) >= 2 * 4
        assert set(counts) == {3}


def test_other_shapes_between_stages_are_refused(tmp_path):
    done = run(["-m", "pipeline_subject", tmp_path, "uneven"], timeout=600)
    assert done.returncode != 0
    assert "sequential_module.0 gives tensors of other shapes or types than for the" in done.stderr
