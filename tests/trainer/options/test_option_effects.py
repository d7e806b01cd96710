"""Each option has an effect: on what torch is given, or on a number."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from my_project_trainer import TrainingModule
from my_project_trainer.checkpoint.dtensors import is_sharded
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.strategies import SingleDevice
from my_project_trainer.strategies.fsdp import fsdp
from my_project_trainer.strategies.optimizers import Optimization, read_optimization
from my_project_trainer.strategies.precision import Precision
from my_project_trainer.strategies.replicated.ddp import DDP
from my_project_trainer.strategies.replicated.ddp_zero1 import DDPZeRO1
from tests.conformance.rows import ROUNDING
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

CPU = torch.device("cpu")


class Layers(TrainingModule):
    """Two layers; their optimizer is given."""

    def __init__(self, optimizer: Callable[["Layers"], Any] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self.optimizer = optimizer
        self.seen: list[Any] = []
        self.look: Callable[[], Any] = lambda: None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(self.look())
        return self.second(self.first(batch).tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        if self.optimizer is not None:
            return self.optimizer(self)
        return torch.optim.SGD(self.parameters(), lr=0.1)


@contextmanager
def set_up(
    strategy: SingleDevice, module: TrainingModule, precision: str = "32-true"
) -> Iterator[Optimization]:
    """A strategy that has set a module up, in a process group of this process alone."""
    strategy.connect(Layout(), [CPU], Precision(precision, "cpu"))
    try:
        configure = module.configure_optimizers
        yield strategy.setup(module, lambda: read_optimization(configure()))
    finally:
        strategy.teardown()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"comm_hook": None, "find_unused_parameters": 0}),
        ({"find_unused_parameters": True}, {"find_unused_parameters": 1}),
        ({"bucket_cap_mb": 3.0}, {"bucket_cap_bytes": 3 * 2**20}),
        ({"communication_hook": "fp16"}, {"comm_hook": "fp16_compress_hook"}),
        ({"communication_hook": "bf16"}, {"comm_hook": "register.<locals>.<lambda>"}),
        ({"communication_hook": "powersgd"}, {"comm_hook": "powerSGD_hook"}),
    ],
    ids=str,
)
def test_torch_s_ddp_has_the_options(options: dict[str, Any], expected: dict[str, Any]) -> None:
    strategy = DDP(**options)
    with set_up(strategy, Layers()):
        assert strategy.wrapped is not None
        told = strategy.wrapped._get_ddp_logging_data()
        assert {name: told.get(name) for name in expected} == expected


def adam(module: Layers) -> torch.optim.Optimizer:
    """Options of the optimizer, and of single parameter groups."""
    groups = [
        {"params": module.first.parameters(), "lr": 0.5, "betas": (0.1, 0.2)},
        {"params": module.second.parameters(), "weight_decay": 0.25},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.125, amsgrad=True)


class Shares(torch.optim.Optimizer):
    """Has a required argument that it does not read from its groups."""

    is_elementwise = True

    def __init__(self, params: Any, lr: float, share: float) -> None:
        super().__init__(params, {"lr": lr, "share": share})
        self.share = share

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * self.share)


def shares(module: Layers) -> torch.optim.Optimizer:
    return Shares(module.parameters(), lr=0.1, share=0.5)


@pytest.mark.parametrize("optimizer", [adam, shares])
def test_zero1_keeps_the_options_of_the_optimizer_and_of_its_groups(optimizer):
    module, alone = Layers(optimizer), Layers(optimizer)
    alone.load_state_dict(module.state_dict())
    batch = torch.tensor([[1.0, -2.0]])
    strategy, plain = DDPZeRO1(), SingleDevice()
    with set_up(strategy, module) as sharded, set_up(plain, alone) as replicated:
        for _ in range(3):
            for stepping, optimization in ((strategy, sharded), (plain, replicated)):
                stepping.forward_backward(batch, 0, weight=1.0, synchronize=True)
                stepping.step(optimization)
        (ours,), (theirs,) = sharded.optimizers, replicated.optimizers
        assert type(ours.optim) is type(theirs)
        for group, expected in zip(ours.optim.param_groups, theirs.param_groups, strict=True):
            names = expected.keys() - {"params"}
            assert {name: group[name] for name in names} == {name: expected[name] for name in names}
    for name, value in alone.state_dict().items():
        assert torch.allclose(module.state_dict()[name], value, rtol=ROUNDING, atol=0), name


def sharding(options: dict[str, Any]) -> tuple[list[mock._Call], set[str]]:
    """The calls of torch's fully_shard, and the names of the units."""
    module = Layers()
    watched = mock.patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard)
    with watched as made, set_up(fsdp.FSDP(**options), module):
        names = {name for name, unit in module.named_modules() if isinstance(unit, FSDPModule)}
    return made.call_args_list, names


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_offloads_and_reshards_as_configured(offload: bool, reshard: bool) -> None:
    options = {"offload": offload, "reshard_after_forward": reshard, "unit_classes": ["Linear"]}
    calls, _ = sharding(options)
    assert len(calls) == 3
    for call in calls:
        policy = CPUOffloadPolicy if offload else OffloadPolicy
        assert type(call.kwargs["offload_policy"]) is policy
        assert call.kwargs["reshard_after_forward"] is reshard


@pytest.mark.parametrize("every", [True, False])
def test_fsdp_shards_accumulated_gradients_or_only_those_of_a_step(every: bool) -> None:
    strategy = fsdp.FSDP(reduce_every_microbatch=every, unit_classes=["Linear"])
    module = Layers()
    with set_up(strategy, module):
        sharded: list[bool] = []
        for synchronize in (False, False, True):
            strategy.forward_backward(torch.ones(1, 2), 0, weight=0.5, synchronize=synchronize)
            sharded.append(all(parameter.grad is not None for parameter in module.parameters()))
        assert sharded == [every, every, True]


def test_fsdp_saves_shards_of_what_an_evaluation_has_gathered() -> None:
    strategy = fsdp.FSDP(reshard_after_forward=False, unit_classes=["Linear"])
    module = Layers()
    with set_up(strategy, module) as optimization:
        with torch.no_grad():
            strategy.forward("training", torch.ones(1, 2), 0)
        assert not any(map(is_sharded, module.parameters()))
        state = strategy.state(optimization)
        assert all(map(is_sharded, state["model"].values()))
        assert state["optimizers"][0]["param_groups"][0]["params"] == list(state["model"])
