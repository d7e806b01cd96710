"""Refuse activations that a plan would shard unevenly, in the forward in which this happens.

torch's styles pass shards on as plain tensors, and the next style takes the length of its own shard
times the number of ranks for the whole length. With uneven shards the ranks would disagree about
it: on gloo they would wait for each other until the timeout.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement, Shard

from ...checkpoint import dtensors
from ...errors import UserError

_Layouts = Iterable[Placement | None]


def watch(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    """Check what a style shards in each forward of a module; called before the style is applied.

    Args:
        name: Name of the module.
        module: The module that gets the style.
        style: One of torch's styles; others are not checked.
        size: Number of ranks of the tensor group.
    """
    _Watched(name, size).register(module, style)


class _Watched:
    """A module, by its name, and the number of ranks over which its activations are sharded."""

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size = name, size

    def register(self, module: nn.Module, style: ParallelStyle) -> None:
        """Register the hooks of a style; they run before torch's own."""
        if isinstance(style, PrepareModuleInputOutput):
            self.register(module, style.prepare_module_input)
            self.register(module, style.prepare_module_output)
        elif isinstance(style, PrepareModuleInput):
            module.register_forward_pre_hook(partial(self._prepared, style), with_kwargs=True)
        elif isinstance(style, SequenceParallel):
            module.register_forward_pre_hook(partial(self._split, style))
        elif isinstance(style, ColwiseParallel | RowwiseParallel):
            module.register_forward_hook(partial(self._output, [None], style.output_layouts))
        elif isinstance(style, PrepareModuleOutput):
            given, wanted = style.output_layouts, style.desired_output_layouts
            module.register_forward_hook(partial(self._output, given, wanted))

    def _prepared(self, style: PrepareModuleInput, _: nn.Module, inputs: Any, named: Any) -> None:
        self._check("input", inputs, style.input_layouts or (), style.desired_input_layouts or ())
        for name, wanted in style.desired_input_kwarg_layouts.items():
            given = style.input_kwarg_layouts.get(name)
            self._check(f"input {name}", [named.get(name)], [given], [wanted])

    def _split(self, style: SequenceParallel, _: nn.Module, inputs: Any) -> None:
        if dtensors.is_sharded(inputs[0]):  # a plain tensor is a shard already
            self._check("input", inputs[:1], inputs[0].placements, style.sequence_sharding)

    def _output(self, given: _Layouts, wanted: _Layouts, _: nn.Module, __: Any, out: Any) -> None:
        self._check("output", out if isinstance(out, tuple) else [out], given, wanted)

    def _check(self, what: str, tensors: Iterable[Any], given: _Layouts, wanted: _Layouts) -> None:
        for tensor, before, after in zip(tensors, given, wanted, strict=False):
            if not isinstance(tensor, Tensor) or not isinstance(after, Shard) or before == after:
                continue
            if tensor.shape[after.dim] % self._size:
                raise UserError(
                    f"parallelize_plan shards the {what} of {self._name} along dimension "
                    f"{after.dim}: its length {tensor.shape[after.dim]} (shape "
                    f"{tuple(tensor.shape)}) is not divisible by tensor={self._size}; pad or cut "
                    "each batch to a length that is"
                )
