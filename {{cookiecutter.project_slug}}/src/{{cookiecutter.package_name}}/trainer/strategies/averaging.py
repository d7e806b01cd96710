"""Gradients averaged after backward, for training steps that call backward themselves.

torch's DDP averages the gradients of one backward that follows its forward. A step with manual
optimization calls backward several times inside its forward, each for some parameters only: so
those that have got a gradient are averaged here, however many there are.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .. import distributed


class GradientAverage:
    """Averages the gradients that backward has touched since the last time.

    Args:
        parameters: of the model, in the same order on every process.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._touched: set[int] = set()
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._note(index))

    def _note(self, index: int):  # type: ignore[no-untyped-def]
        def note(parameter: Tensor) -> None:
            self._touched.add(index)

        return note

    def average(self) -> None:
        """Average over all processes; one that did not use a parameter counts with zero."""
        used = torch.zeros(len(self._parameters))
        used[list(self._touched)] = 1
        self._touched.clear()
        indices = distributed.all_reduce(used, "max").nonzero().flatten().tolist()
        groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for index in indices:
            parameter = self._parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            groups[parameter.grad.dtype, parameter.grad.device].append(parameter.grad)
        for gradients in groups.values():
            _average(gradients)


def _average(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= distributed.world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))
