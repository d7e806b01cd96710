"""``ddp_zero1``: ddp with optimizer states sharded over the processes.

Source: https://docs.pytorch.org/docs/stable/distributed.optim.html#torch.distributed.optim.ZeroRedundancyOptimizer
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ...module import TrainingModule
from .. import sharded_optimizers
from ..memory import Memory, Sizes, divided
from ..optimizer_state import parameter_names
from ..optimizers import Optimization
from .ddp import DDP


class DDPZeRO1(DDP):
    """``ddp`` with optimizer states sharded over the processes.

    Each process steps its shard and broadcasts the new values.
    """

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        optimization = super().setup(module, configure)
        return optimization.replaced(_sharded)

    def memory(self, sizes: Sizes) -> Memory:
        share = sizes.largest_share()
        own = replace(divided(sizes, optimizer=share), step=sizes.step_of(share))
        return super().memory(own)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return sharded_optimizers.state(optimizer, parameter_names(self.module))

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        sharded_optimizers.load_state(optimizer, saved, parameter_names(self.module))


def _sharded(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    groups = [dict(group) for group in optimizer.param_groups]
    options = sharded_optimizers.constructor_options(optimizer)
    return ZeroRedundancyOptimizer(groups, type(optimizer), **options)
