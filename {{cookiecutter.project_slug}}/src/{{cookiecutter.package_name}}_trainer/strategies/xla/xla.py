"""``xla``: TPUs by PyTorch/XLA, one process per device.

PyTorch/XLA records a step in a graph, compiled once for equal steps, and runs it when it is marked.

Source: https://docs.pytorch.org/xla/release/r2.9/index.html
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ...errors import UserError
from ...launch.cluster import Layout
from ...logging import torchmetrics_state
from ...module import TrainingModule
from ...options import Options
from ..base import Devices, RankLocal, Stage
from ..gradients import sparse
from ..gradients.averaging import GradientAverage
from ..limits import Limits
from ..memory import Memory, Sizes
from ..optimizers import Optimization
from ..precision import Precision
from ..process_group import ProcessGroupStrategy
from . import DEVICE, INSTALL, PACKAGE, problems_of

_SEEDS = 2**63
_NO_FLOAT16 = "TPUs have no float16 and no gradient scaler; use 'bf16-mixed' or 'bf16-true'"


def _generator_state() -> dict[str, Tensor]:
    from torch_xla.core import xla_model

    state = xla_model.get_rng_state() % 2**64 - _SEEDS
    return {"generator": torch.tensor(state, dtype=torch.int64)}


def _load_generator(state: Mapping[str, Tensor]) -> None:
    if "generator" in state:
        from torch_xla.core import xla_model

        xla_model.set_rng_state(int(state["generator"]) + _SEEDS)


class XLA(ProcessGroupStrategy):
    """One process per TPU device, through PyTorch/XLA; gradients are averaged after backward.

    With ``accelerator="cpu"`` each process computes on XLA's CPU device, and gradients are averaged
    over gloo: for tests. On TPUs, gradients are averaged inside the graph.

    Args:
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    limits: Limits = Limits(
        max_nodes=1,
        accelerators=("cpu", "tpu"),
        refused={
            "16-mixed": _NO_FLOAT16,
            "16-true": _NO_FLOAT16,
            "parameter_averaging": "averages were not tried with XLA's compiled steps; use "
            "strategy='ddp' on another accelerator",
            "skipped_batches": "XLA compiles the same operations for each step; leave batches out "
            "of the data",
            "skipping": "XLA's compiled steps would wait for the device in each; use 'stop'",
            "compile": "XLA compiles each step already; leave compile out",
            "activation_checkpointing": (
                "XLA would merge the second forward with the first; use a smaller batch and "
                "accumulate_grad_batches"
            ),
        },
        packages={PACKAGE: INSTALL},
        always=("compile",),
    )
    rank_local = RankLocal(_generator_state, _load_generator)

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        if module is not None:
            return sparse.problems_of(module, "XLA has only dense ones")
        return problems_of(options)

    def memory(self, sizes: Sizes) -> Memory:
        note = "the compiler decides what is alive"
        return replace(super().memory(sizes), mark="unverified", note=note)

    def connect(self, layout: Layout, devices: Devices, precision: Precision) -> None:
        first = devices[0]
        device = _start(layout, None if first.type == "cpu" else first.index)
        self._is_cpu = first.type == "cpu"
        host = [torch.device("cpu")]  # the process group is of the hosts: gloo
        super().connect(layout, host, Precision(precision.name, device.type))
        self.device = device

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        self.start_equal((*module.parameters(), *module.buffers()))
        add_up = None if self._is_cpu else _sum_over_devices
        if self.layout.world_size > 1:
            self.averaged = GradientAverage(module.parameters(), add_up=add_up)
        return configure()

    def place(self, module: TrainingModule) -> None:
        super().place(module)
        for metric in torchmetrics_state.metrics(module):
            metric.dist_sync_fn = metric.dist_sync_fn or _gather
        from torch_xla.core import xla_model

        xla_model.set_rng_state(torch.initial_seed() % _SEEDS)  # draws dropout masks
        _sync()

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = super().forward(stage, batch, batch_idx)
        if stage != "training":
            _sync_outside_steps()
        return outputs

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)
        if not synchronize:
            _sync()  # a graph for each micro-batch, so that all are the same

    def step_optimizer(self, optimizer: Optimizer) -> None:
        super().step_optimizer(optimizer)
        _sync()

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        return _on_cpu(super().state(optimization))


def _gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Gather a metric's state from all ranks: as torchmetrics does, on the hosts."""
    from torchmetrics.utilities.distributed import gather_all_tensors

    return [state.to(tensor.device) for state in gather_all_tensors(tensor.cpu(), group)]


def _start(layout: Layout, chip: int | None) -> torch.device:
    """Start the runtime once, and return this process' device.

    ``chip``: index of the TPU chip of a single process; ``None``: XLA's CPU device.
    Source: https://docs.pytorch.org/xla/release/r2.9/learn/pytorch-on-xla-devices.html
    """
    os.environ[DEVICE] = "CPU" if chip is None else "TPU"
    if chip is not None and layout.world_size == 1:
        os.environ.setdefault("TPU_VISIBLE_CHIPS", str(chip))
    import torch_xla
    from torch_xla import runtime
    from torch_xla._internal import pjrt

    if chip is not None and layout.world_size > 1:
        pjrt.initialize_multiprocess(layout.local_rank, layout.local_world_size)
    else:
        pjrt.initialize_singleprocess()
    if runtime.addressable_device_count() > 1:
        problem = "a process has several devices here (TPU v2, v3 and 7x, or CPU_NUM_DEVICES)"
        advice = "use TPU v4 to v6e, and unset CPU_NUM_DEVICES"
        raise UserError(f"strategy='xla': {problem}, and it trains on one; {advice}")
    device: torch.device = torch_xla.device()
    return device


def _sync() -> None:
    """End the graph that was recorded, and have the device run it; the host does not wait."""
    import torch_xla

    torch_xla.sync()


def _sync_outside_steps() -> None:
    """The same, with the device's generator left as it is, which :func:`_sync` moves on."""
    from torch_xla.core import xla_model

    state = xla_model.get_rng_state()
    _sync()
    xla_model.set_rng_state(state)


def _sum_over_devices(tensor: Tensor) -> Tensor:
    """Sum over all TPU devices, inside the graph: the host does not take part."""
    from torch_xla.core import xla_model

    total: Tensor = xla_model.all_reduce(xla_model.REDUCE_SUM, tensor)
    return total


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    _sync_outside_steps()
    return dict(tree_map_only(Tensor, lambda tensor: tensor.cpu(), state))
