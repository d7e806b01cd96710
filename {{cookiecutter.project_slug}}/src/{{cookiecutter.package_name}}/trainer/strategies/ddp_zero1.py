"""``ddp_zero1``: ddp whose optimizer states are divided among the processes.

Source: https://docs.pytorch.org/docs/stable/distributed.optim.html#torch.distributed.optim.ZeroRedundancyOptimizer
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ..module import TrainingModule
from ..optimization import Optimization, parameter_names
from . import divided_optimizers
from .ddp import DDP


class DDPZeRO1(DDP):
    """Each process keeps and steps its share of the optimizers' state, then tells the others."""

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        optimization = super().setup(module, configure)
        return optimization.replaced(_divided)

    def state(self, optimization: Optimization | None) -> dict[str, Any]:
        names = parameter_names(self.module)
        optimizers = optimization.optimizers if optimization else []
        return {
            "model": dict(self.module.state_dict()),
            "optimizers": [divided_optimizers.state(each, names) for each in optimizers],
        }

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        super().load_state(state, optimization)
        for optimizer in optimization.optimizers if optimization else []:
            # What this process steps lies in the inner optimizer; torch leaves a second copy here.
            optimizer.state.clear()


def _divided(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    groups = [dict(group) for group in optimizer.param_groups]
    options = divided_optimizers.constructor_options(optimizer)
    return ZeroRedundancyOptimizer(groups, type(optimizer), **options)
