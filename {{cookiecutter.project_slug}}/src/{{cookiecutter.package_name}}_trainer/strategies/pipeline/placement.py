"""How the processes that have the same stages of several pipelines hold their parameters."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor, nn

from ...module import TrainingModule
from .partition import Ownership
from .processes import Processes


class Placement:
    """Each process has the parameters of its stages whole; gradients are averaged over pipelines.

    A strategy that shards them overrides this. The pipeline itself only needs to know when the
    parameters are used, and whose gradients are left to average.

    Args:
        processes: The processes of the pipelines.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def shard(self, module: TrainingModule, ownership: Ownership) -> None:
        """Shard this process' parameters, before optimizers are created; may replace them.

        Args:
            module: The user's module; parameters are equal on all processes that have them.
            ownership: Which process has which parameter.
        """

    def prepare_part(self, part: nn.Sequential) -> None:
        """Add to a part of ``sequential_module`` what applies to each part of it."""

    def gathered(self) -> AbstractContextManager[None]:
        """Context of forwards and backwards, in which modules have the parameters they use."""
        return nullcontext()

    def end_backward(self, *, synchronize: bool) -> None:
        """End the backwards of a batch, in :meth:`gathered`.

        Args:
            synchronize: Average the gradients of sharded parameters over pipelines; False while
                gradients are accumulated.
        """

    def averaged(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of this process' parameters whose gradients are averaged in :attr:`replicas`."""
        return parameters

    def replicas(self) -> dist.ProcessGroup | None:
        """Group of the processes that average gradients; ``None`` if there is one pipeline."""
        return self._processes.across_replicas()

    def counted(self) -> dist.ProcessGroup | None:
        """Group over which a norm is summed from the parameters that :meth:`counts_here`."""
        each = self._processes
        return each.among(range(each.count)) if each.count > 1 else None

    def counts_here(self, parameter: Tensor) -> bool:
        """Whether no lower rank in :meth:`counted` that has this stage holds the same values."""
        return True

    def close(self) -> None:
        """Drop the process groups."""
