"""Leave parameters without a gradient in a step as they were, as optimizers of torch do.

ZeRO's optimizer steps slices of all parameters, with zeros where a step computed no gradient: it
would decay those weights, and move them on by their momentum.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...launch import collectives, output
from ..gradients.averaging import leaving_out_unused
from .slices import FlatSlices, ParameterSlices, Slice


@functools.cache  # once in a process
def _note_common_counts() -> None:
    output.print_lines(
        "note: a step uses other parameters than the one before, and DeepSpeed counts the steps of "
        "all together: Adam corrects its averages as if all were used; strategy='fsdp' does not",
        error=True,
    )


def average_used(engine: Any, named: Sequence[tuple[str, Tensor]], *, averages: bool) -> None:
    """Without ZeRO, average gradients; or not, if the optimizer averages its momentum instead."""
    with leaving_out_unused([each for _, each in named]):
        if averages:
            engine.allreduce_gradients()
            return
        for _, each in named:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad


class UnusedParameters:
    """Restores slices of parameters after ``optimizer`` stepped them without a gradient."""

    def __init__(
        self,
        optimizer: Optimizer,
        slices: FlatSlices | ParameterSlices,
        parameters: Sequence[Tensor],
    ) -> None:
        self._slices, self._parameters = slices, parameters
        self._used: set[int] = set()
        self._used_before: set[int] | None = None
        self._kept: dict[tuple[Slice, str], Tensor] = {}
        optimizer.register_step_pre_hook(self._keep)
        optimizer.register_step_post_hook(self._restore)

    def note(self, parameter: Tensor) -> None:
        """Note that a backward has computed the gradient of a parameter."""
        self._used.add(id(parameter))

    def end_step(self, optimizer: Optimizer) -> None:
        """Begin the next step; say once if its optimizer counts steps of others than this one."""
        counts = any("step" in state for state in optimizer.state.values())
        if counts and self._used_before not in (None, self._used) and collectives.rank() == 0:
            _note_common_counts()
        self._used_before, self._used = self._used, set()

    def _keep(self, optimizer: Optimizer, *_: Any) -> None:
        self._kept = {key: part.clone() for key, part in self._parts(optimizer).items()}

    @torch.no_grad()
    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        for key, part in self._parts(optimizer).items():
            part.copy_(self._kept[key]) if key in self._kept else part.zero_()  # of a new state
        self._kept = {}

    def _parts(self, optimizer: Optimizer) -> dict[tuple[Slice, str], Tensor]:
        """Slices of weights and states that have no gradient, in the tensors that have them."""
        unused = [each for each in self._parameters if id(each) not in self._used]
        found = [place for each in unused if (place := self._slices.of(each)) and place.length]
        return {
            (place, name): place.within(each)
            for place in found
            for name, each in {"": place.flat, **optimizer.state.get(place.flat, {})}.items()
            if isinstance(each, Tensor) and each.shape == place.flat.shape
        }
