"""``mesh`` with several stages: a pipeline whose stages are sharded and replicated."""

import datetime
import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor

from ....errors import ConfigurationError
from ....launch.collectives import How
from ....module import TrainingModule
from ....options import Options
from ...fsdp.fsdp import FSDP
from ..pipeline.processes import Processes
from ..pipeline.strategy import Sequential
from . import plan, stages
from .by_mesh import OnMesh
from .sizes import Sizes
from .stages import MeshStages

# Options of FSDP's units, of which a stage is one.
_OF_UNITS = inspect.signature(FSDP).parameters.keys() - inspect.signature(Sequential).parameters


class PipelinedMesh(OnMesh, Sequential):
    """Pipeline parallelism over the stages of a mesh; see :class:`.strategy.Mesh`.

    The outermost dimension is the pipeline: neighboring ranks have the same stages.

    Args:
        data, shard, tensor, pipeline, context: Sizes of the dimensions, as in :class:`Mesh`.
        options: As in :class:`Sequential`; those of FSDP have no effect.

    Raises:
        ConfigurationError: Options that are invalid or contradict each other; one line each.
    """

    def __init__(
        self,
        data: int = -1,
        shard: int = 1,
        tensor: int = 1,
        pipeline: int = -1,
        context: int = 1,
        **options: Any,
    ) -> None:
        self.sizes = Sizes(data, shard, tensor, pipeline, context)
        lines = self.sizes.problems()
        lines += [
            f"strategy_options.{name} has no effect with pipeline={pipeline}: the stages of a "
            "process are one unit, gathered for a whole batch; remove it"
            for name in options
            if name in _OF_UNITS
        ]
        given = {name: value for name, value in options.items() if name not in _OF_UNITS}
        try:
            super().__init__(**given)
        except ConfigurationError as error:
            lines += error.problems
        if lines:
            raise ConfigurationError(lines)

    # --- before any process is started ------------------------------------------------------------

    def replicas(self, devices: int, nodes: int) -> int:
        found = super().replicas(devices, nodes)
        self.shape = replace(self.shape, stages=self.sizes.pipeline)
        self._check_processes(devices * nodes)
        return found

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        lines = super().problems(options, module)
        if module is None:
            return lines
        if of_plan := plan.problems_of(module, self.sizes):
            return lines + of_plan
        return lines + stages.problems_of(module, self.sizes)

    # --- before the first step -----------------------------------------------------------------

    def make_processes(self, count: int) -> Processes:
        return Processes(
            self._layout.rank,
            self._layout.world_size,
            count,
            self.shape.rounds,
            self.timeout_seconds,
            are_neighbors=False,
        )

    def make_placement(self) -> MeshStages:
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        return MeshStages(self.processes, self.sizes, self.device.type, timeout)

    def reduce(self, tensor: Tensor, how: How) -> Tensor:
        reduced = super().reduce(tensor, how)
        return reduced / self.sizes.tensor if how == "sum" else reduced
