"""Asynchronous saves copy states of optimizers in the background; their files are the same."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.checkpoint import writing
from my_project_trainer.checkpoint.reading import Checkpoint
from my_project_trainer.checkpoint.writing import Checkpoints
from my_project_trainer.errors import CheckpointError
from tests.project import run
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from background_subject import CASES, STEPS, WIDTH
from checkpoint_subject import read

AUTOMATIC = [name for name in CASES if name != "manual"]
# Copies in the background of a rank: two moments of two weights, after each step.
COPIES = 2 * 2 * STEPS
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "ranks", "cases", "copies"),
    [
        pytest.param("single_device", 1, CASES, COPIES, id="single_device"),
        pytest.param("ddp", 2, CASES, COPIES, id="ddp", marks=slow),
        pytest.param("fsdp", 2, CASES, COPIES, id="fsdp"),
        pytest.param("ddp_zero1", 2, AUTOMATIC, COPIES // 2, id="ddp_zero1", marks=slow),
        pytest.param("local_sgd", 2, ["plain"], 0, id="local_sgd", marks=slow),
    ],
)
def test_files_equal_those_of_synchronous_saves(
    tmp_path: Path, strategy: str, ranks: int, cases: list[str], copies: int
) -> None:
    """Byte by byte; only rank 0 copies what all ranks have."""
    done = run(["-m", "background_subject", tmp_path, str(ranks), strategy, *cases])
    assert done.returncode == 0, done.stderr
    for case in cases:
        found = sorted(tmp_path.glob(f"{case}-sync/checkpoints/step-*/rank-*"))
        assert len(found) == STEPS * ranks
        for path in found:
            step, file = path.parts[-2:]
            other = tmp_path / f"{case}-async" / "checkpoints" / step / file
            assert path.read_bytes() == other.read_bytes(), (case, step, file)
        for rank in range(ranks):
            wanted = 0 if strategy == "ddp" and rank else copies
            assert json.loads((tmp_path / f"{case}-{rank}.json").read_text()) == wanted, case


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    """An optimizer that has made its first step."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    found = torch.optim.Adam(layer.parameters())
    layer.weight.grad = torch.ones(WIDTH, WIDTH)
    found.step()
    return found


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has copies begin late."""
    copy = Checkpoints._copy_rest

    def late(*given: Any) -> None:
        time.sleep(0.2)
        copy(*given)

    monkeypatch.setattr(Checkpoints, "_copy_rest", late)


@pytest.mark.usefixtures("delayed")
def test_a_step_waits_for_the_copies_and_later_ones_do_not(
    tmp_path: Path, optimizer: torch.optim.Optimizer
) -> None:
    hooks = len(_global_optimizer_pre_hooks)
    [values] = optimizer.state.values()
    before = {name: each.clone() for name, each in values.items()}
    writer = Checkpoints(tmp_path, asynchronous=True)
    writer.save(1, {"optimizers": [dict(values)], "other": torch.zeros(1)}, {}, ["optimizers"])
    optimizer.step()
    optimizer.step()
    writer.close()
    assert len(_global_optimizer_pre_hooks) == hooks
    [found] = read(tmp_path / "step-00000001")["optimizers"]
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert not torch.equal(values["exp_avg"], before["exp_avg"])


@pytest.mark.usefixtures("delayed")
def test_a_change_of_what_is_copied_fails_the_save_and_keeps_the_one_before(
    tmp_path: Path, optimizer: torch.optim.Optimizer
) -> None:
    [values] = optimizer.state.values()
    writer = Checkpoints(tmp_path, asynchronous=True)
    for step in (1, 2):
        writer.save(step, {"optimizers": [dict(values)]}, {}, ["optimizers"])
        if step == 1:
            writer.wait()
        values["exp_avg"].zero_()
    with pytest.raises(CheckpointError) as raised:
        writer.close()
    assert raised.value.problems == [
        f"{tmp_path / 'step-00000002'}: cannot be saved: state/optimizers/0/exp_avg was changed, "
        "not by an optimizer's step, while it was copied; set async_checkpoints=False (rank 0); "
        f"the newest checkpoint is {tmp_path / 'step-00000001'}"
    ]
    assert Checkpoint(tmp_path / "step-00000001").step == 1


def test_small_tensors_and_other_parts_are_copied_at_once(tmp_path: Path) -> None:
    large, small = torch.zeros(WIDTH, WIDTH), torch.zeros(())
    named = {"optimizers/0": large, "optimizers/1": small, "model/0": large, "optimizers_/0": large}
    chunks = {f"state/{name}": writing._chunk(each) for name, each in named.items()}
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    left = checkpoints._copy(chunks, ("state/optimizers/",))
    checkpoints.close()
    assert [name for name, *_ in left] == ["state/optimizers/0"]
