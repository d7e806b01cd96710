"""The strategy ``xla`` on XLA's CPU device: `make test-xla` runs this file, nothing else does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.project import succeed
from torch.nn.functional import mse_loss

from xla_subject import STEPS, Net, data

SECONDS = 900.0
pytestmark = pytest.mark.timeout(SECONDS + 60)


def told(folder: Path, command: str, devices: int, **how: Any) -> Any:
    succeed(["-m", "xla_subject", command, folder, str(devices)], timeout=SECONDS, **how)
    return json.loads((folder / f"{command}-0.json").read_text())


def test_equal_steps_are_compiled_once_and_not_waited_for(tmp_path):
    """Two epochs: the second has nothing new for XLA, and the host reads nothing during a step."""
    counts = told(tmp_path, "steps", 1)
    assert len(counts) == 2 * STEPS
    compiled, read = zip(*counts, strict=True)
    assert compiled[0] < compiled[3]
    # From the fourth step on they are the same; the epoch's end, which saves, is another graph.
    assert compiled[3] == compiled[STEPS - 1] == compiled[STEPS] - 1
    assert compiled[STEPS] == compiled[-1]
    assert read[3] == read[STEPS - 1] < read[STEPS] == read[-1]


def test_accumulation_and_clipping_compile_nothing_in_a_second_epoch(tmp_path):
    """On two processes; three steps in turn have the same graphs, two micro-batches each."""
    compiled = [count for count, _ in told(tmp_path, "accumulated", 2)]
    assert len(compiled) == 2 * 2 * STEPS
    assert compiled[STEPS] == compiled[2 * STEPS - 1] == compiled[2 * STEPS] - 1
    assert compiled[2 * STEPS] == compiled[-1]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_resumed_run_draws_the_same_dropout_masks(tmp_path, devices):
    uninterrupted, resumed, without = told(tmp_path, "resumed", devices)
    assert uninterrupted == resumed
    assert max(abs(one - other) for one, other in zip(uninterrupted, without, strict=True)) > 1e-2


@pytest.mark.parametrize("devices", [1, 2])
def test_metrics_and_predictions_are_those_of_the_whole_data(tmp_path, devices):
    error, loss, predictions = told(tmp_path, "evaluated", devices)
    x, y = data(30).dataset.tensors
    with torch.no_grad():
        expected = Net().eval().layers(x)
    assert error == pytest.approx(float((expected - y).abs().mean()), abs=1e-6)
    assert loss == pytest.approx(float(mse_loss(expected, y)), abs=1e-6)
    assert predictions == pytest.approx(expected[:, 0].tolist(), abs=1e-6)


def test_what_it_does_not_support_is_refused_in_one_line_each(tmp_path):
    no_tpu, half, compiled, batch_size, sparse, is_imported = told(tmp_path, "refused", 1)
    assert no_tpu == ["accelerator='tpu': this machine has none; use 'cpu' or 'auto'"]
    reason = "TPUs have no float16 and no gradient scaler; use 'bf16-mixed' or 'bf16-true'"
    assert half == [f"strategy='xla' does not support '16-mixed': {reason}"]
    problem = "strategy='xla' does not support compile: XLA compiles each step already"
    assert compiled == [f"{problem}; leave compile out"]
    [line] = batch_size
    assert line.startswith("find_batch_size: strategy='xla' compiles a step for each batch size")
    [line] = sparse
    assert line.startswith("words.weight has sparse gradients (sparse=True): XLA has only dense")
    assert not is_imported  # not even to count TPUs
