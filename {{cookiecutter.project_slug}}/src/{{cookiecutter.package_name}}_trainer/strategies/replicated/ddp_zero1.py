"""``ddp_zero1``: ddp with optimizer states sharded over the processes.

Source: https://docs.pytorch.org/docs/stable/distributed.optim.html#torch.distributed.optim.ZeroRedundancyOptimizer
"""

from dataclasses import replace
from functools import partial

from torch.distributed.optim import ZeroRedundancyOptimizer

from ...errors import refuse
from ..engine_optimizers import EngineGroups, problems_of, sharded_optimizer
from ..memory import Memory, Sizes, divided
from ..optimizers import Optimization
from .ddp import DDP


class DDPZeRO1(DDP):
    """``ddp`` with optimizer states sharded over the processes.

    Each process steps its shard and broadcasts the new values.
    """

    def sharded(self, optimization: Optimization) -> Optimization:
        refuse(problems_of(optimization.optimizers, "parameters", "ddp_zero1"))
        sharded = optimization.replaced(partial(sharded_optimizer, ZeroRedundancyOptimizer))
        self.engine_groups = EngineGroups(sharded.optimizers, grows=True)
        return sharded

    def memory(self, sizes: Sizes) -> Memory:
        share = sizes.largest_share()
        return super().memory(replace(divided(sizes, optimizer=share), step=sizes.step_of(share)))
