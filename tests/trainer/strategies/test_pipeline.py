"""Pipelines compute what one process computes, and go on to the last bit."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.project import run, succeed

from pipeline_subject import CASES, PORTED, SAMPLES, SEEN, STOP, dashed

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
        names = [name for name, case in CASES.items() if (case.processes, case.exhaustive) == alike]
        for arguments in (names, ["alone", *names]):
            succeed(["-m", "pipeline_subject", path, *arguments], timeout=600)
        return path

    return folder


def results(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{dashed(name)}.safetensors")


@TRIED
def test_equals_one_process(trained, name):
    case = CASES[name]
    folder = trained(case.processes, case.exhaustive)
    names = (name, f"{name} alone")
    ours, theirs = (results(folder, file) | results(folder, f"{file} evaluated") for file in names)
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
    uninterrupted, resumed = results(folder, name), results(folder, f"{name} resumed")
    assert len(results(folder, f"{name} stopped")["logged/loss"]) == STOP
    assert all(torch.equal(uninterrupted[key], resumed[key]) for key in uninterrupted)


def test_goes_on_with_other_stages_and_schedules_and_in_one_process(tmp_path):
    for name in PORTED:
        succeed(["-m", "pipeline_subject", tmp_path, "ported", name], timeout=600)
    full = results(tmp_path, "whole")
    assert len(full["logged/loss"]) > STOP == len(results(tmp_path, "stopped")["logged/loss"])
    for name in list(PORTED)[1:]:
        ported = results(tmp_path, name)
        assert ported.keys() == full.keys()
        assert len(ported["logged/loss"]) == len(full["logged/loss"]) - STOP
        # Sums over micro-batches are the same, but not that of one process over a whole batch.
        tolerance = 2e-6 if name == "one" else 0.0
        for key, value in ported.items():
            expected = full[key][-len(value) :].double()
            difference = (value.double() - expected).abs().max()
            assert difference <= tolerance * max(1.0, expected.abs().max()), (name, key)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """What each of two processes does in two steps of four micro-batches, by schedule and rank."""
    folder = tmp_path_factory.mktemp("seen-")
    succeed(["-m", "pipeline_subject", folder, "seen"], timeout=600)
    which = [(name, rank) for name in SEEN for rank in range(2)]
    return {(name, rank): read(folder / f"{name}-{rank}.json") for name, rank in which}


def read(path: Path) -> Any:
    """What a process has done: copies, data types, and messages before and in the steps."""
    copies, weights, *messages = json.loads(path.read_text())
    return copies, weights, *({tuple(key): count for key, count in message} for message in messages)


@pytest.mark.parametrize("name", SEEN)
def test_weights_are_cast_once_for_all_micro_batches(seen, name):
    for rank in range(2):
        copies, weights, _, _ = seen[name, rank]
        assert copies == 3
        assert {dtype for dtype, _ in weights} == {"torch.float32"}


@pytest.mark.parametrize("name", SEEN)
def test_links_between_stages_are_open_before_the_first_step(seen, name):
    for rank in range(2):
        _, _, before, messages = seen[name, rank]
        peers = {peer for _, peer, _ in messages}
        assert peers == {1 - rank} == {peer for _, peer, _ in before}


@pytest.mark.parametrize("name", SEEN)
def test_shapes_are_sent_once_for_batches_of_the_same_shapes(seen, name):
    for rank in range(2):
        _, _, _, messages = seen[name, rank]
        described = sum(count for key, count in messages.items() if "uint8" in key[2])
        sent = sum(count for key, count in messages.items() if key[0] == "send" and "16" in key[2])
        assert described == 1  # sent, or received
        assert sent >= 2 * 4


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("uneven", "sequential_module.0 gives tensors of other shapes or types than for the"),
        ("buffer", "error: a stage changes a tensor in place, such as a buffer in a forward, that"),
        ("input", "error: training_step asks for a gradient with respect to what enters a pipe"),
    ],
)
def test_what_a_stage_cannot_do_is_said(tmp_path, kind, line):
    done = run(["-m", "pipeline_subject", tmp_path, "failing", kind], timeout=600)
    assert done.returncode != 0
    assert line in done.stderr
