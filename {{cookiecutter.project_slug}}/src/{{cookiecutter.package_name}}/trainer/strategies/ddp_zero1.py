"""``ddp_zero1``: ddp whose optimizer states are divided among the processes.

Source: https://docs.pytorch.org/docs/stable/distributed.optim.html#torch.distributed.optim.ZeroRedundancyOptimizer
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ..checkpoint import Spread
from ..module import TrainingModule
from ..optimization import Optimization, parameter_names
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
            "optimizers": [_state(each, names) for each in optimizers],
        }

    def load_state(self, state: Mapping[str, Any], optimization: Optimization | None) -> None:
        super().load_state(state, optimization)
        for optimizer in optimization.optimizers if optimization else []:
            # What this process steps lies in the inner optimizer; torch leaves a second copy here.
            optimizer.state.clear()


def _divided(optimizer: Optimizer) -> ZeroRedundancyOptimizer:
    groups = [dict(group) for group in optimizer.param_groups]
    # Some optimizers keep more among their defaults than they take (AdamW: decoupled_weight_decay).
    takes = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in takes}
    return ZeroRedundancyOptimizer(groups, type(optimizer), **options)


def _state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """As optimization.optimizer_state gives it, with this process' share of the parameters."""
    own = cast(ZeroRedundancyOptimizer, optimizer).optim.state
    return {
        "state": Spread({names[id(parameter)]: dict(values) for parameter, values in own.items()}),
        "param_groups": [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
    }
