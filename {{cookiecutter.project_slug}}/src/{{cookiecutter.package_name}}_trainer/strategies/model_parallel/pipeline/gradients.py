"""Gradients of a pipeline: sum those of shared parameters, average over pipelines, and clip."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, get_total_norm

from ....checkpoint import dtensors
from ....module import TrainingModule
from ...clipping import bound_norm, with_local_gradient
from .partition import Ownership
from .processes import Processes


class Placement:
    """How processes with the same stages hold their parameters: whole, with averaged gradients.

    A strategy that shards them overrides this.

    Args:
        processes: The processes of the pipelines.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def shard(self, module: TrainingModule, ownership: Ownership) -> None:
        """Shard this process' parameters, equal so far, before optimizers are created."""

    def prepare_part(self, part: nn.Sequential) -> None:
        """Add to a part of ``sequential_module`` what applies to each part of it."""

    def gathered(self) -> AbstractContextManager[None]:
        """Context of forwards and backwards, in which modules have the parameters they use."""
        return nullcontext()

    def end_backward(self, *, synchronize: bool) -> None:
        """End the backwards of a batch; ``synchronize``: average the gradients of shards."""

    def averaged(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of this process' parameters whose gradients are averaged over :meth:`replicas`."""
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


class Gradients:
    """The gradients of this process' parameters.

    A parameter that several stages use, or that is outside ``sequential_module``, is on several
    processes: each computes a part of its gradient, and the sum is that of one process.

    Args:
        parameters: All parameters of the module.
        ownership: Which process has which.
        processes: The processes of the pipeline.
        placement: How processes with the same stages hold them.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        ownership: Ownership,
        processes: Processes,
        placement: Placement,
    ) -> None:
        self._ownership, self._placement = ownership, placement
        self._counted, self._replicas = placement.counted(), placement.replicas()
        shared = ownership.shared(parameters)
        groups = [(processes.among(positions), own) for positions, own in shared.items()]
        self._shared = [(own, group) for group, own in groups if group is not None]
        self._averaged = placement.averaged([each for each in parameters if ownership.is_own(each)])

    def synchronize(self) -> None:
        """Sum and average the gradients of a step, after its last backward."""
        for tensors, group in self._shared:
            _reduce(tensors, group, 1)
        if self._replicas is not None:
            _reduce(self._averaged, self._replicas, self._replicas.size())

    def clip(self, parameters: Sequence[Tensor], value: float, algorithm: str) -> Tensor | None:
        """Clip by the norm over all stages, which is returned, or by value."""
        own = [with_local_gradient(each) for each in parameters]
        if algorithm == "value":
            # torch's function refuses an empty list, and a stage may have no parameters.
            if any(each.grad is not None for each in own):
                clip_grad_value_(own, value)
            return None
        counted = [
            each.grad
            for each, whole in zip(own, parameters, strict=True)
            if each.grad is not None
            and self._ownership.counts_here(whole)
            and self._placement.counts_here(whole)
        ]
        norm = get_total_norm(counted)
        if self._counted is not None:
            square = norm.detach().cpu().double() ** 2
            dist.all_reduce(square, group=self._counted)
            norm = square.sqrt().float()
        return bound_norm(own, value, norm)

    def close(self) -> None:
        """Drop the process groups."""
        self._shared, self._replicas, self._counted = [], None, None


def _reduce(parameters: Sequence[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
    """Sum gradients over a group; a process without a gradient contributes zeros."""
    trained = [each for each in parameters if each.requires_grad]
    if not trained:
        return
    has = torch.tensor([float(each.grad is not None) for each in trained])
    dist.all_reduce(has, dist.ReduceOp.MAX, group)
    same_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter, anywhere in zip(trained, has.tolist(), strict=True):
        if not anywhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = dtensors.local(parameter.grad)
        same_type[gradient.dtype, gradient.device].append(gradient)
    for gradients in same_type.values():
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat, group=group)
        if divisor > 1:
            flat /= divisor
        parts = flat.split([each.numel() for each in gradients])
        torch._foreach_copy_(
            gradients, [part.view_as(each) for each, part in zip(gradients, parts, strict=True)]
        )
