"""The parts of a fit, which the loop and its checkpoints share."""

from dataclasses import dataclass

from ..callbacks import HookCalls
from ..data import Feed
from ..logging import Outputs
from ..module import TrainingModule
from ..options import Options
from ..strategies import Strategy
from ..strategies.optimizers import Optimization
from .manual_optimization import ManualOptimization
from .position import Position


@dataclass(frozen=True)
class FitParts:
    """The parts of a fit, after the strategy's ``setup``.

    ``optimization``: the optimizers that ``setup`` returned; ``manual``: only for a module with
    manual optimization; ``feed``: training batches; ``outputs``: where values are logged;
    ``calls``: hooks of callbacks and of the module; ``flops_per_sample``: if MFU is logged.
    """

    options: Options
    module: TrainingModule
    strategy: Strategy
    optimization: Optimization
    manual: ManualOptimization | None
    feed: Feed
    outputs: Outputs
    position: Position
    calls: HookCalls
    flops_per_sample: float | None = None
