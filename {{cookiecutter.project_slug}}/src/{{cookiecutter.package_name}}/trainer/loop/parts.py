"""What a fit is made of: shared by the loop that trains, and by what saves and resumes it."""

from dataclasses import dataclass

from ..arguments.options import Options
from ..data.feed import Feed
from ..logging.outputs import Outputs
from ..module import TrainingModule
from ..strategies import Strategy
from ..strategies.optimizers import Optimization
from .manual_optimization import ManualOptimization
from .position import Position


@dataclass(frozen=True)
class FitParts:
    """What a fit is made of.

    ``optimization``: what the strategy, which has set the module up, made of the user's optimizers;
    ``manual``: for a module with manual optimization; ``feed``: of training batches; ``outputs``:
    where values go.
    """

    options: Options
    module: TrainingModule
    strategy: Strategy
    optimization: Optimization
    manual: ManualOptimization | None
    feed: Feed
    outputs: Outputs
    position: Position
