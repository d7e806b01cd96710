"""Loading of optimizer states and loss scaling of DeepSpeed's strategies, without DeepSpeed."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from my_project_trainer import TrainingModule
from my_project_trainer.errors import UserError
from my_project_trainer.strategies.deepspeed import process
from my_project_trainer.strategies.deepspeed.deepspeed import DeepSpeed
from my_project_trainer.strategies.deepspeed.state import ShardedState, Slice
from my_project_trainer.strategies.precision import Precision
from torch import Tensor, nn


class Halves:
    """The second half of each parameter, as ZeRO has it on the second of two processes."""

    def __init__(self, module: nn.Module) -> None:
        halves = ((id(p), (p.numel() + 1) // 2) for p in module.parameters())
        self.flats = {key: torch.zeros(size) for key, size in halves}

    def of(self, parameter: Tensor) -> Slice:
        flat = self.flats[id(parameter)]
        offset = len(flat)
        return Slice(flat, 0, offset, parameter.numel() - offset)

    def shape(self, parameter: Tensor) -> torch.Size:
        return parameter.shape

    def relink(self) -> None:
        pass


class Scaled(nn.Module):
    """A parameter of four elements, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(()))


def test_the_step_count_is_not_sharded() -> None:
    module = Scaled()
    slices: Any = Halves(module)
    optimizer = torch.optim.SGD([nn.Parameter(flat) for flat in slices.flats.values()], lr=0.1)
    names = ["weight", "scale"]
    state = ShardedState(module, slices, optimizer, [names])
    saved = {
        "weight": {"step": torch.tensor(5.0), "exp_avg": torch.arange(4.0)},
        "scale": {"step": torch.tensor(5.0), "exp_avg": torch.tensor(7.0)},
    }
    state._load_values(saved)
    states = {name: optimizer.state[slices.of(getattr(module, name)).flat] for name in names}
    assert [float(states[name]["step"]) for name in names] == [5.0, 5.0]
    assert states["weight"]["exp_avg"].tolist() == [2.0, 3.0]
    assert states["scale"]["exp_avg"].tolist() == [0.0]  # the other process holds it


@pytest.mark.parametrize(("was_trained", "changed"), [(False, "trained"), (True, "frozen")])
def test_a_parameter_that_is_unfrozen_during_a_fit_is_refused(was_trained, changed):
    strategy = DeepSpeed(stage=2)
    parameter = nn.Parameter(torch.ones(1), requires_grad=not was_trained)
    strategy._trains = [("head.weight", parameter, was_trained)]
    with pytest.raises(UserError, match=f"head.weight is {changed} since the fit began"):
        strategy.forward_backward(None, 0, weight=1.0, synchronize=True)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_zero_uses_the_scale_of_the_trainer_s_scaler(precision, monkeypatch):
    strategy = DeepSpeed(stage=2)
    told: list[float] = []
    strategy.precision = Precision(precision, "cpu")
    if strategy.precision.scaler is not None:
        strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        strategy.precision.scale(torch.ones(()))
    strategy.zero = SimpleNamespace(override_loss_scale=told.append)
    boundary = {"set_gradient_accumulation_boundary": lambda ends: None}
    strategy.engine = SimpleNamespace(basic_optimizer=None, **boundary)
    strategy._trains = []
    strategy.module = TrainingModule()
    monkeypatch.setattr(DeepSpeed, "forward", lambda *arguments: torch.ones((), requires_grad=True))
    monkeypatch.setattr(DeepSpeed, "backward", lambda *arguments, **options: None)
    strategy.forward_backward(None, 0, weight=1.0, synchronize=True)
    assert told == ([512.0] if precision == "16-mixed" else [])


@pytest.mark.needs("deepspeed")
def test_groups_of_deepspeed_have_our_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.utils import groups

    # Restored after the test.
    monkeypatch.setattr(TorchBackend, "new_group", None)
    monkeypatch.setattr(groups, "_WORLD_GROUP", None)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *ranks, timeout: (*ranks, timeout))
    process.adopt_process_group(timedelta(seconds=60))
    assert TorchBackend.new_group(None, [0, 2]) == ([0, 2], timedelta(seconds=60))
