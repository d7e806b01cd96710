"""Each option has an effect: on what torch is given, or on a number."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from my_project_trainer import Trainer, TrainingModule
from my_project_trainer.checkpoint import is_sharded
from my_project_trainer.data import sampling
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.memory import activation_checkpointing
from my_project_trainer.strategies.fsdp import fsdp
from my_project_trainer.strategies.fsdp.fsdp import HSDP
from my_project_trainer.strategies.optimizers import Optimization, read_optimization
from my_project_trainer.strategies.precision import Precision
from my_project_trainer.strategies.replicated.ddp import DDP
from my_project_trainer.strategies.replicated.ddp_zero1 import DDPZeRO1
from my_project_trainer.strategies.replicated.single_device import SingleDevice
from tests.conformance.rows import ROUNDING
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.utils.data import DataLoader, TensorDataset

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


# --- the trainer's -------------------------------------------------------------------------------


def test_deterministic_applies_to_the_runs_of_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    module = Layers()
    module.look = torch.are_deterministic_algorithms_enabled
    for deterministic in (True, False):
        Trainer(
            **{"accelerator": "cpu", "devices": 1, "max_steps": 1, "loggers": []},
            **{"deterministic": deterministic, "default_root_dir": tmp_path},
            **{"enable_progress_bar": False, "run_name": str(deterministic)},
        ).fit(module, [torch.ones(1, 2)])
    assert module.seen == [True, False]


def test_a_loader_that_is_read_in_the_global_order_keeps_its_options() -> None:
    given: dict[str, Any] = {
        **{"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3, "timeout": 700},
        **{"worker_init_fn": print, "collate_fn": sum, "multiprocessing_context": "spawn"},
        "pin_memory": True,
    }
    loader = DataLoader(TensorDataset(torch.ones(8)), batch_size=2, **given)
    order = sampling.GlobalOrder(
        sampling.BatchPlan(8, 2), 0, seed=0, shuffle=True, keyed=False, fill=True
    )
    ordered = sampling.order_globally(loader, order)
    for name in given:
        assert getattr(ordered, name) == getattr(loader, name), name


# --- ddp -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"comm_hook": None, "find_unused_parameters": 0}),
        ({"find_unused_parameters": True}, {"find_unused_parameters": 1}),
        ({"bucket_cap_mb": 3.0}, {"bucket_cap_bytes": 3 * 2**20}),
        ({"communication_hook": "fp16"}, {"comm_hook": "fp16_compress_hook"}),
        ({"communication_hook": "bf16"}, {"comm_hook": "_bf16"}),
        ({"communication_hook": "powersgd"}, {"comm_hook": "powerSGD_hook"}),
    ],
    ids=str,
)
def test_torch_s_ddp_has_the_options(options: dict[str, Any], expected: dict[str, Any]) -> None:
    strategy = DDP(**options)
    with set_up(strategy, Layers()):
        assert strategy._wrapped is not None
        told = strategy._wrapped._get_ddp_logging_data()
        assert {name: told.get(name) for name in expected} == expected


def test_gradients_are_not_averaged_while_they_are_accumulated() -> None:
    strategy, module = DDP(), Layers()
    with set_up(strategy, module):
        module.look = lambda: strategy._wrapped and strategy._wrapped.require_backward_grad_sync
        for synchronize in (False, False, True, False):
            batch = torch.ones(1, 2)
            strategy.forward_backward(batch, 0, weight=0.5, synchronize=synchronize)
        assert module.seen == [False, False, True, False]


# --- ddp_zero1 -----------------------------------------------------------------------------------


def adam(module: Layers) -> torch.optim.Optimizer:
    """Options of the optimizer, and of single parameter groups."""
    groups = [
        {"params": module.first.parameters(), "lr": 0.5, "betas": (0.1, 0.2)},
        {"params": module.second.parameters(), "weight_decay": 0.25},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.125, amsgrad=True)


class Shares(torch.optim.Optimizer):
    """Has a required argument that it does not read from its groups."""

    def __init__(self, params: Any, lr: float, share: float) -> None:
        super().__init__(params, {"lr": lr, "share": share})
        self.share = share

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad, alpha=group["lr"] * self.share)


def shares(module: Layers) -> torch.optim.Optimizer:
    return Shares(module.parameters(), lr=0.1, share=0.5)


@pytest.mark.parametrize("optimizer", [adam, shares])
def test_zero1_keeps_the_options_of_the_optimizer_and_of_its_groups(
    optimizer: Callable[[Layers], Any],
) -> None:
    module, alone = Layers(optimizer), Layers(optimizer)
    alone.load_state_dict(module.state_dict())
    batch = torch.tensor([[1.0, -2.0]])
    strategy, plain = DDPZeRO1(), SingleDevice()
    with set_up(strategy, module) as sharded, set_up(plain, alone) as whole:
        for _ in range(3):
            for each, optimization in ((strategy, sharded), (plain, whole)):
                each.forward_backward(batch, 0, weight=1.0, synchronize=True)
                each.step(optimization)
        (ours,), (theirs,) = sharded.optimizers, whole.optimizers
        assert type(ours.optim) is type(theirs)
        for group, expected in zip(ours.optim.param_groups, theirs.param_groups, strict=True):
            names = expected.keys() - {"params"}
            assert {name: group[name] for name in names} == {name: expected[name] for name in names}
    for name, value in alone.state_dict().items():
        assert torch.allclose(module.state_dict()[name], value, rtol=ROUNDING, atol=0), name


# --- fsdp ----------------------------------------------------------------------------------------


def sharding(options: dict[str, Any]) -> tuple[list[mock._Call], set[str]]:
    """The calls of torch's fully_shard, and the names of the units."""
    module = Layers()
    watched = mock.patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard)
    with watched as made, set_up(fsdp.FSDP(**options), module):
        found = {name for name, each in module.named_modules() if isinstance(each, FSDPModule)}
    return made.call_args_list, found


def test_fsdp_s_options_choose_its_units() -> None:
    assert sharding({})[1] == set()
    assert sharding({"unit_parameters": 5})[1] == {"first"}
    assert sharding({"unit_parameters": 1})[1] == {"first", "second"}
    assert sharding({"unit_classes": ["Linear"]})[1] == {"first", "second"}


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_offloads_and_reshards_as_configured(offload: bool, reshard: bool) -> None:
    options = {"offload": offload, "reshard_after_forward": reshard, "unit_classes": ["Linear"]}
    calls, _ = sharding(options)
    assert len(calls) == 3
    for call in calls:
        assert type(call.kwargs["offload_policy"]) is (
            CPUOffloadPolicy if offload else OffloadPolicy
        )
        assert call.kwargs["reshard_after_forward"] is reshard


@pytest.mark.parametrize("every", [True, False])
def test_fsdp_shards_accumulated_gradients_or_only_those_of_a_step(every: bool) -> None:
    strategy = fsdp.FSDP(reduce_every_microbatch=every, unit_classes=["Linear"])
    module = Layers()
    with set_up(strategy, module):
        sharded: list[bool] = []
        for synchronize in (False, False, True):
            strategy.forward_backward(torch.ones(1, 2), 0, weight=0.5, synchronize=synchronize)
            sharded.append(all(each.grad is not None for each in module.parameters()))
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


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_fsdp_clips_what_is_sharded_and_what_each_process_holds_together(algorithm: str) -> None:
    # In mixed precision each process holds the parameters of BatchNorm.
    module, strategy = Layers(), fsdp.FSDP()
    module.first = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with set_up(strategy, module, "bf16-mixed") as optimization:
        batch = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [0.5, -1.0]])
        strategy.forward_backward(batch, 0, weight=1.0, synchronize=True)

        def gradients() -> Tensor:
            found = [getattr(each.grad, "_local_tensor", each.grad) for each in module.parameters()]
            return torch.cat([each.flatten() for each in found if each is not None])

        before = gradients()
        bound = float(before.norm() if algorithm == "norm" else before.abs().max()) / 2
        norm = strategy.clip(optimization, bound, algorithm)
        expected = before / 2 if algorithm == "norm" else before.clamp(-bound, bound)
        assert torch.allclose(gradients(), expected, rtol=1e-5, atol=0)
        if algorithm == "norm":
            assert norm is not None
            assert float(norm) == pytest.approx(float(before.norm()))


def test_units_of_fsdp_may_be_inside_a_part_that_is_computed_again() -> None:
    module, strategy = Layers(), fsdp.FSDP(unit_classes=["Linear"])
    module.first = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))
    with activation_checkpointing.applied(module, ["first"]), set_up(strategy, module):
        strategy.forward_backward(torch.ones(1, 2), 0, weight=1.0, synchronize=True)
        assert all(each.grad is not None for each in module.parameters())


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """The first of four ranks, whose collectives are torch's fake ones."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, [[0, 1, 2, 3]]),
        ({"shard_size": 2}, [[0, 1], [2, 3]]),
        ({"shard_size": 1}, [[0], [1], [2], [3]]),
    ],
    ids=str,
)
def test_hsdp_shards_among_shard_size_ranks(
    options: dict[str, Any], ranks: list[list[int]]
) -> None:
    strategy = HSDP(**options)
    strategy._layout, strategy.device = Layout(world_size=4, local_world_size=4), CPU
    assert strategy.make_mesh().mesh.tolist() == ranks
