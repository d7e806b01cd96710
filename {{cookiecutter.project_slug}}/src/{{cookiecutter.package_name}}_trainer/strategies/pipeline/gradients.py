"""Gradients of a pipeline: sum those of shared parameters, average over pipelines, and clip."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_value_, get_total_norm

from ...checkpoint import dtensors
from ..clipping import bound_norm, with_local_gradient
from .partition import Ownership
from .placement import Placement
from .processes import Processes


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
        self._ownership = ownership
        self._placement = placement
        self._counted = placement.counted()
        self._shared: list[tuple[list[Tensor], dist.ProcessGroup]] = []
        for positions, tensors in ownership.shared(parameters).items():
            group = processes.among(positions)
            if group is not None:
                self._shared.append((tensors, group))
        self._averaged = placement.averaged([each for each in parameters if ownership.is_own(each)])
        self._replicas = placement.replicas()

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
        pairs = zip(own, parameters, strict=True)
        counted = [each.grad for each, whole in pairs if self._counts_here(whole)]
        norm = get_total_norm([each for each in counted if each is not None])
        if self._counted is not None:
            square = norm.detach().cpu().double() ** 2
            dist.all_reduce(square, group=self._counted)
            norm = square.sqrt().float()
        return bound_norm(own, value, norm)

    def _counts_here(self, parameter: Tensor) -> bool:
        counts = self._ownership.counts_here(parameter)
        return counts and self._placement.counts_here(parameter)

    def close(self) -> None:
        """Drop the process groups."""
        self._shared, self._replicas, self._counted = [], None, None


def _reduce(parameters: Sequence[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
    """Sum gradients over a group; a process without a gradient contributes zeros."""
    trained = [each for each in parameters if each.requires_grad]
    has = torch.tensor([float(each.grad is not None) for each in trained])
    if not trained:
        return
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
