"""All ranks skip a step if one of them finds an overflow in its shard of the gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from my_project_trainer.checkpoint import Checkpoint, resolve
from my_project_trainer.strategies.precision import Precision
from torch import Tensor, nn

from fitting import fits, saved
from skipping_subject import FACTOR, INPUT


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("elsewhere", [0.0, 1.0])
def test_a_rank_skips_a_step_in_which_another_finds_an_overflow(monkeypatch, together, elsewhere):
    plain: Any = dist.all_reduce

    def add_other_rank(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        tensor += elsewhere
        return plain(tensor, *arguments, **options)

    precision = Precision("16-mixed", "cpu")
    if together:
        precision.skip_together()
    monkeypatch.setattr(dist, "all_reduce", add_other_rank)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scale = float(precision.scale(torch.ones(())))
    precision.scale(weight.sum()).backward()
    precision.unscale([optimizer])
    precision.scaler.step(optimizer)
    precision.update()
    skips = together and elsewhere > 0
    assert weight.tolist() == [1.0 if skips else 0.5] * 3
    assert float(precision.scale(torch.ones(()))) == (scale / 2 if skips else scale)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skipping")
    shared = {"devices": 2, "strategy": "ddp_sharded", "max_epochs": 1}
    runs: list[dict[str, Any]] = [
        {"name": "overflows", "module": "Overflows", "precision": "16-mixed"},
        {"name": "views", "module": "Views"},
    ]
    runs = [{**run, **shared, "module": f"skipping_subject.{run['module']}"} for run in runs]
    assert fits(folder, runs, engine="fairscale") == [{run["name"]: "" for run in runs}] * 2
    return folder


def weights(folder: Path) -> set[float]:
    model = saved(folder)
    assert sum(value.numel() for value in model.values()) == 16
    return {value for weight in model.values() for value in weight.flatten().tolist()}


@pytest.mark.slow
@pytest.mark.needs("fairscale")
def test_no_rank_steps_if_one_element_on_another_overflows(trained: Path) -> None:
    assert weights(trained / "overflows") == {-2 * INPUT * FACTOR}
    assert Checkpoint(resolve(trained / "overflows")).state()["precision"]["scale"] == 2.0**14


@pytest.mark.slow
@pytest.mark.needs("fairscale")
def test_a_gradient_is_not_averaged_in_memory_that_backward_still_uses(trained: Path) -> None:
    model = saved(trained / "views")
    assert model["bias"].tolist() == [-9.0, -15.0]  # three steps
    assert model["layer.weight"].tolist() == [[-9.0, -18.0], [-15.0, -30.0]]
