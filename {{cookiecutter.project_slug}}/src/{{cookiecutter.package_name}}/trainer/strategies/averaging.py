"""Gradients averaged after backward: those that no engine averages within it.

torch's DDP averages the gradients of one backward that follows its forward, of the parameters that
were trained when it was made. A step with manual optimization calls backward several times inside
its forward, each for some parameters only; and a layer may be thawed later. So those that have got
a gradient are averaged here, however many there are.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .. import distributed


class GradientAverage:
    """Averages the gradients that are there and have changed since they were last averaged.

    Those of parameters that are toggled off stay as they are, until a backward of their own.

    Args:
        parameters: of the model, in the same order on every process.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [each for each in parameters if each.is_floating_point()]
        self._averaged: set[int] = set()
        for index, parameter in enumerate(self._parameters):
            # torch hooks into what gets a gradient; one that is frozen may be thawed later.
            requires_grad = parameter.requires_grad
            parameter.requires_grad_().register_post_accumulate_grad_hook(self._note(index))
            parameter.requires_grad_(requires_grad)

    def _note(self, index: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self._averaged.discard(index)

        return note

    @property
    def has_trained(self) -> bool:
        """Whether any of the parameters is trained now; to be the same on every process."""
        return any(each.requires_grad for each in self._parameters)

    def average(self) -> None:
        """Average over all processes; one that did not use a parameter counts with zero."""
        waiting = [self._waits(index) for index in range(len(self._parameters))]
        waits_anywhere = distributed.all_reduce(torch.tensor(waiting, dtype=torch.float32), "max")
        indices = waits_anywhere.nonzero().flatten().tolist()
        self._averaged.update(indices)
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for index in indices:
            parameter = self._parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            groups[parameter.grad.dtype, parameter.grad.device].append(parameter.grad)
        for gradients in groups.values():
            _average(gradients)

    def _waits(self, index: int) -> bool:
        parameter = self._parameters[index]
        is_new = parameter.grad is not None and index not in self._averaged
        return is_new and parameter.requires_grad


def _average(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= distributed.world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))
