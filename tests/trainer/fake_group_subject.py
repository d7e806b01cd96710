"""Bytes of one rank of many, by what holds them: the others do not exist, and nothing travels.

``python -m fake_group_subject CASE/WORLD_SIZE …`` prints for each, as JSON, the bytes of
parameters, gradients and optimizer states before and after a step, and what else is alive. Where
the strategy allows it, tensors are fake, too: they have shapes and no memory.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from my_project_trainer import strategies
from my_project_trainer.launch import rendezvous
from my_project_trainer.launch.cluster import Layout
from my_project_trainer.strategies.fsdp import state as sharded_state
from my_project_trainer.strategies.gradients.same_use import SameUse
from my_project_trainer.strategies.optimizers import configured
from my_project_trainer.strategies.precision import Precision
from my_project_trainer.strategies.replicated import ddp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from fitting import Descends
from live_storages import Live, Pair, storages

WORLDS = (8, 64)
NODE = 8
WIDTH, BLOCKS = 64, 32
WEIGHT = WIDTH * WIDTH * 4
"""Bytes of one of the ``2 * BLOCKS`` weights."""
UNITS = {"unit_parameters": 100}


class Net(Descends, by=torch.optim.Adam, lr=0.01):
    """Blocks one after another; all weights have the same size, of which 64 ranks have parts."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(*(Pair(WIDTH) for _ in range(BLOCKS)))

    def parallelize_plan(self, mesh: Any) -> dict[str, Any]:
        block = "sequential_module.*"
        return {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.sequential_module(batch).square().mean()
        return loss


@dataclass(frozen=True)
class Case:
    """A strategy; ``"world/N"`` in its options stands for a part of the world size."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_fake: bool = True

    def options_in(self, world: int) -> dict[str, Any]:
        return {
            key: world // int(value.partition("/")[2]) if isinstance(value, str) else value
            for key, value in self.options.items()
        }


CASES = {
    "ddp": Case("ddp", is_fake=False),
    "ddp_zero1": Case("ddp_zero1", is_fake=False),
    "fsdp": Case("fsdp", UNITS),
    "fsdp, whole": Case("fsdp", {**UNITS, "reshard_after_forward": False}),
    "hsdp": Case("hsdp", UNITS),
    "mesh, tensor": Case("mesh", {"tensor": 8}, is_fake=False),
    "mesh, shards": Case("mesh", {**UNITS, "data": 2, "shard": "world/4", "tensor": 2}),
    "ddp_sharded": Case("ddp_sharded", is_fake=False),
}


def measure(case: Case, world: int) -> dict[str, Any]:
    """Train two steps as the last rank; what is alive around the second."""
    rank = world - 1
    layout = Layout(rank, rank % NODE, world, NODE, rank // NODE, world // NODE)
    strategy = strategies.create(case.name, case.options_in(world))
    assert strategy.replicas(NODE, world // NODE)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if case.is_fake else contextlib.nullcontext()
    live = Live()
    with (
        mock.patch.dict("os.environ", {"TRAINER_BACKEND": "fake"}),
        mock.patch.object(rendezvous, "connect_store", return_value=FakeStore()),
        # It would ask the others by the store.
        mock.patch.object(SameUse, "note"),
        # Fake tensors cannot be swapped, and all are on their device.
        mock.patch.object(sharded_state, "move_rest"),
        mock.patch.object(ddp, "rebuild_buckets"),
        # Meshes read the values of their ranks, which are real.
        mock.patch.object(DeviceMesh, "__init__", unset_fake_temporarily()(DeviceMesh.__init__)),
        mock.patch.object(
            DeviceMesh, "_concatenate", unset_fake_temporarily()(DeviceMesh._concatenate)
        ),
        contextlib.ExitStack() as stack,
    ):
        strategy.connect(layout, [torch.device("cpu")], Precision("32-true", "cpu"))
        stack.callback(strategy.teardown)
        stack.enter_context(fake)
        stack.enter_context(live)
        strategy._is_checked = True  # type: ignore[attr-defined]
        if hasattr(strategy, "make_mesh"):
            strategy.make_mesh = unset_fake_temporarily()(strategy.make_mesh)
        module = Net()
        run = SimpleNamespace(seed=0, current_epoch=0, batch_samples=8)
        optimization = strategy.setup(module, lambda: configured(module))
        if isinstance(strategy, ddp.DDP):  # the fake group's work has no result
            strategy.wrapped.register_comm_hook(None, _unchanged)
        module.trainer_state = replace(module.trainer_state, run=run)  # type: ignore[arg-type]
        held: dict[str, Any] = {}
        for number in range(2):
            batch = torch.ones(8, WIDTH)
            strategy.forward_backward(batch, number, weight=1.0, synchronize=True)
            held["before"] = _held(live, module, optimization)
            strategy.step(optimization)
            del batch
            held["after"] = _held(live, module, optimization)
        module.trainer_state = replace(module.trainer_state, run=None)
    return held


def _unchanged(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _held(live: Live, module: nn.Module, optimization: Any) -> dict[str, int]:
    parameters = storages(module.parameters())
    gradients = storages(parameter.grad for parameter in module.parameters())
    steps = [getattr(o, "optim", o) for o in optimization.optimizers]
    states = [state for step in steps for state in step.state.values()]
    optimizer = storages(
        value for state in states for value in state.values() if isinstance(value, Tensor)
    )
    known = {**parameters, **gradients, **optimizer}
    rest = [size for key, size in live.sizes().items() if key not in known]
    return {
        "parameters": sum(parameters.values()),
        "gradients": sum(gradients.values()),
        "optimizer": sum(optimizer.values()),
        "rest": sum(size for size in rest if size >= WIDTH * 4 * 8 * 2),
    }


def main(*cases: str) -> None:
    for case in cases:
        name, _, world = case.rpartition("/")
        try:
            held = measure(CASES[name], int(world))
        except Exception:
            held = {"error": traceback.format_exc()[-1200:]}
        print(json.dumps({"name": name, "world": int(world), **held}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
