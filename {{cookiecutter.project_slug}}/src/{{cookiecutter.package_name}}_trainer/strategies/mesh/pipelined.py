"""``mesh`` with several stages: a pipeline whose stages are sharded and replicated."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ...checkpoint import dtensors
from ...errors import ConfigurationError
from ...launch.collectives import How
from ...module import TrainingModule
from ..fsdp.state import groups_split
from ..pipeline.processes import Processes
from ..pipeline.strategy import Sequential
from ..step import Stage
from . import plan, stages
from .sizes import Sizes
from .stages import MeshStages


class PipelinedMesh(Sequential):
    """Pipeline parallelism over the stages of a mesh; see :class:`.strategy.Mesh`.

    The outermost dimension is the pipeline: neighboring ranks have the same stages.

    Args:
        data: Number of replicas of the model; -1: all remaining processes.
        shard: Number of shards of each replica's parameters, gradients and optimizer states.
        tensor: Number of ranks over which layers are sharded.
        pipeline: Number of processes over which stages are divided.
        context: Not supported with stages.
        balance, microbatches, schedule, checkpoint, stages_per_process: As in :class:`Sequential`.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
        of_units: Options of FSDP; none has an effect.

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
        balance: str | Sequence[int] = "parameters",
        microbatches: int = 4,
        schedule: str = "1f1b",
        checkpoint: str = "never",
        stages_per_process: int | None = None,
        timeout_seconds: float = 600.0,
        **of_units: Any,
    ) -> None:
        self.sizes = Sizes(data, shard, tensor, pipeline, context)
        lines = self.sizes.problems()
        lines += [
            f"strategy_options.{name} has no effect with pipeline={pipeline}: the stages of a "
            "process are one unit, gathered for a whole batch; remove it"
            for name in of_units
        ]
        options: Mapping[str, Any] = {
            "balance": balance,
            "microbatches": microbatches,
            "schedule": schedule,
            "checkpoint": checkpoint,
            "stages_per_process": stages_per_process,
            "timeout_seconds": timeout_seconds,
        }
        try:
            super().__init__(**options)
        except ConfigurationError as error:
            lines += error.problems
        if lines:
            raise ConfigurationError(lines)

    # --- before any process is started ------------------------------------------------------------

    def check_processes(self, processes: int) -> None:
        self.sizes = self.sizes.on(processes)
        self.shape = replace(self.shape, stages=self.sizes.pipeline)
        super().check_processes(processes)

    def replicas(self, devices: int, num_nodes: int) -> int:
        return self.sizes.on(devices * num_nodes).replicas

    def problems_of(self, module: TrainingModule) -> list[str]:
        lines = super().problems_of(module)
        if of_plan := plan.problems_of(module, self.sizes):
            return lines + of_plan
        return lines + stages.problems_of(module, self.sizes)

    # --- before the first step -----------------------------------------------------------------

    def make_processes(self, count: int) -> Processes:
        return Processes(
            self.layout.rank,
            self.layout.world_size,
            count,
            self.shape.rounds,
            self.timeout_seconds,
            are_neighbors=False,
        )

    def make_placement(self) -> MeshStages:
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        return MeshStages(self.processes, self.sizes, self.device.type, timeout)

    @property
    def data_replicas(self) -> int:
        return self.sizes.replicas

    @property
    def data_index(self) -> int:
        return self.processes.replica // self.sizes.tensor

    @property
    def is_first_of_replica(self) -> bool:
        return self.layout.rank % self.sizes.tensor == 0

    @property
    def random_rank(self) -> int:
        return self.layout.rank - self.layout.rank % self.sizes.tensor

    # --- steps ---------------------------------------------------------------------------------

    def read_loss(self, outputs: Any) -> Tensor:
        loss: Tensor = dtensors.whole(super().read_loss(outputs))
        return loss

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = super().forward(stage, batch, batch_idx)
        return tree_map(dtensors.whole, outputs) if stage == "predict" else outputs

    def optimizer_step(self, optimizer: Optimizer) -> None:
        with groups_split(optimizer):
            super().optimizer_step(optimizer)

    def reduce(self, tensor: Tensor, how: How) -> Tensor:
        reduced = super().reduce(tensor, how)
        return reduced / self.sizes.tensor if how == "sum" else reduced
