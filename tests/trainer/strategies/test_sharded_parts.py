"""Loading, clipping, averaging and gradient scaling of sharded strategies, in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.checkpoint import dtensors, fill_module, writing
from my_project_trainer.checkpoint.reading import Checkpoint, resolve
from my_project_trainer.errors import ConfigurationError
from my_project_trainer.strategies import clipping
from my_project_trainer.strategies.fsdp import fsdp
from my_project_trainer.strategies.gradients import averaging
from my_project_trainer.strategies.optimizer_state import (
    load_optimizer_state,
    optimizer_state,
    parameter_names,
)
from my_project_trainer.strategies.precision import Precision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


def test_a_stored_tensor_is_not_read_into_one_of_another_shape(tmp_path: Path) -> None:
    writing.Checkpoints(tmp_path).save(1, {"weight": torch.arange(6.0).view(2, 3)}, {})
    stored = Checkpoint(resolve(tmp_path)).stored_state()["weight"]
    target = torch.zeros(2, 3)
    stored.read_into(target)
    assert target.tolist() == [[0, 1, 2], [3, 4, 5]]
    for shape in ((3, 2), (6,), (1, 3), (3, 3)):
        with pytest.raises(ValueError, match=r"shape \(2, 3\) in the checkpoint and \(") as raised:
            stored.read_into(torch.zeros(shape))
        assert str(raised.value).endswith(f"{shape} here")


def test_a_model_of_other_names_is_not_loaded() -> None:
    module = nn.Linear(2, 1)
    saved = {name: torch.full_like(value, 7.0) for name, value in module.state_dict().items()}
    fill_module(module, saved)
    assert {value for weight in module.parameters() for value in weight.flatten().tolist()} == {7.0}
    for other in ({**saved, "more": torch.ones(1)}, {"weight": saved["weight"]}):
        with pytest.raises(RuntimeError, match=r"(Unexpected|Missing) key\(s\) in state_dict"):
            fill_module(module, other)


def test_an_optimizer_s_state_of_another_shape_is_not_loaded(monkeypatch):
    # The state of a parameter that is whole may have any shape.
    monkeypatch.setattr(dtensors, "is_sharded", lambda parameter: True)
    module = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = parameter_names(module)
    saved = optimizer_state(optimizer, names)
    load_optimizer_state(optimizer, saved, names)
    for shape in ((1,), (4,), (2, 1), (1, 1)):
        saved["state"]["weight"]["exp_avg"] = torch.zeros(shape)
        with pytest.raises(ConfigurationError, match="'exp_avg' has another shape than its param"):
            load_optimizer_state(optimizer, saved, names)


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("norm", [0.6, 0.0, 0.0]), ("value", [1.0, 1.0, 1.0])]
)
def test_the_norm_is_that_of_the_gradients_of_all_processes(monkeypatch, algorithm, expected):
    # Another process has gradients with a norm of 4.
    monkeypatch.setattr(clipping.collectives, "all_reduce", lambda squares: squares + 16.0)
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 0.0]) if algorithm == "norm" else torch.full((3,), 3.0)
    without = nn.Parameter(torch.zeros(2))
    clipping.clip_gradients([parameter, without], 1.0, algorithm, lambda _: True)
    assert parameter.grad.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("group")
def test_averaged_gradients_are_not_averaged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(
        averaging.collectives, "sum_in_place", lambda flat, group: sent.append(flat.numel()) or flat
    )
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    average = averaging.GradientAverage([first, second])
    first.sum().backward()
    average.average()
    average.average()
    assert sent == [3]
    second.sum().backward()
    average.average()
    assert sent == [3, 5]
    first.sum().backward()
    average.average()
    assert sent == [3, 5, 3]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("overflows", ["sharded", "whole", "both", "none"])
def test_an_overflow_in_sharded_or_in_whole_gradients_skips_the_step(overflows: str) -> None:
    mesh = init_device_mesh("cpu", (1,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    replicated = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([sharded, replicated], lr=0.5)
    precision = Precision("16-mixed", "cpu")
    scale = float(precision.scale(torch.ones(())))
    for name, parameter in (("sharded", sharded), ("whole", replicated)):
        value = float("inf") if overflows in (name, "both") else 1.0
        parameter.grad = torch.full_like(parameter, value * scale)
    precision.unscale([optimizer])
    precision.scaler.step(optimizer)
    precision.update()
    stepped = 0.5 if overflows == "none" else 1.0
    local: Any = sharded.detach()
    assert local.to_local().tolist() == [stepped] * 4
    assert replicated.tolist() == [stepped] * 2
    assert float(precision.scale(torch.ones(()))) == (scale if overflows == "none" else scale / 2)


# --- private API of torch ------------------------------------------------------------------------


@pytest.mark.usefixtures("group")
def test_torch_s_records_of_a_unit_have_what_fsdp_reads() -> None:
    # Without them, ranks that use other parameters hang, and gloo's threads outlive their group.
    unit: Any = fully_shard(nn.Linear(2, 2))
    unit(torch.ones(1, 2))
    (records,) = fsdp._groups(unit)
    assert {record._param_fqn for record in records.fsdp_params} == {"weight", "bias"}
    for param in records.fsdp_params:
        assert param.sharded_param.requires_grad
        assert param._unsharded_param.is_leaf
    assert records.mesh_info.shard_process_group is not None
    fsdp.drop_groups(unit)
    assert records.mesh_info.shard_process_group is None
