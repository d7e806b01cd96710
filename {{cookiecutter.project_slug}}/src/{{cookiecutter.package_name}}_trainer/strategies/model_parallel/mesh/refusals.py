"""Refuse, in a forward or backward, what torch's DTensors compute wrong or wait for without end."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
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
from torch.utils._pytree import tree_leaves

from ....checkpoint import dtensors
from ....errors import UserError
from ....launch import collectives

_Layouts = Iterable[Placement | None]
# Relative difference of the norms of two gradients that should be equal; not 0: a kernel of a GPU
# may sum in any order.
_TOLERANCE = 1e-2


def watch_lengths(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    """Refuse activations that a style would shard unevenly; called before the style is applied.

    torch's styles pass shards on as plain tensors, and take the length of a shard times the number
    of ranks for the whole length. Ranks would disagree about it, and wait until the timeout.

    Args:
        name: Name of the module.
        module: The module that gets the style.
        style: One of torch's styles; others are not checked.
        size: Number of ranks of the tensor group.
    """

    def check(what: str, tensors: Iterable[Any], given: _Layouts, wanted: _Layouts) -> None:
        for tensor, before, after in zip(tensors, given, wanted, strict=False):
            if not isinstance(tensor, Tensor) or not isinstance(after, Shard) or before == after:
                continue
            if tensor.shape[after.dim] % size:
                raise UserError(
                    f"parallelize_plan shards the {what} of {name} along dimension {after.dim}: "
                    f"its length {tensor.shape[after.dim]} (shape {tuple(tensor.shape)}) is not "
                    f"divisible by tensor={size}; pad or cut each batch to a length that is"
                )

    def before(_: nn.Module, inputs: Any, named: Any) -> None:
        if isinstance(style, PrepareModuleInput):
            check("input", inputs, style.input_layouts or (), style.desired_input_layouts or ())
            for key, wanted in style.desired_input_kwarg_layouts.items():
                given = style.input_kwarg_layouts.get(key)
                check(f"input {key}", [named.get(key)], [given], [wanted])
        elif isinstance(style, SequenceParallel) and dtensors.is_sharded(inputs[0]):
            # A plain tensor is a shard already.
            check("input", inputs[:1], inputs[0].placements, style.sequence_sharding)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else [output]
        if isinstance(style, ColwiseParallel | RowwiseParallel):
            check("output", outputs, [None], style.output_layouts)
        elif isinstance(style, PrepareModuleOutput):
            check("output", outputs, style.output_layouts, style.desired_output_layouts)

    if isinstance(style, PrepareModuleInputOutput):
        watch_lengths(name, module, style.prepare_module_input, size)
        watch_lengths(name, module, style.prepare_module_output, size)
    else:
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def first_order(output: Any) -> Any:
    """Refuse gradients of gradients through an output, and return it.

    torch moves gradients between ranks and layouts by operations without a gradient. Those of
    compiled code it refuses itself.
    """
    for each in () if torch.compiler.is_compiling() else tree_leaves(output):
        if isinstance(each, Tensor) and each.requires_grad:
            each.register_hook(_refuse_second_order)
    return output


def _refuse_second_order(_: Any) -> None:
    """Raise UserError in a backward with ``create_graph``: only there gradients are recorded."""
    if torch.is_grad_enabled():
        raise UserError(
            "create_graph=True: the gradient of a gradient is not supported through layers of a "
            "tensor group, whose ranks would each compute a part of it; use strategy='ddp' or "
            "'fsdp'"
        )


def compare_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare the gradients of the parameters that all ranks of a tensor group hold.

    Raises:
        UserError: They differ. Activations are sharded, and the module's style does not say so.
    """
    norms: dict[str, Tensor] = {}
    for name, each in module.named_parameters():
        mesh: Any = getattr(each, "device_mesh", None)
        if mesh is None or "tensor" not in mesh.mesh_dim_names:
            own = torch.zeros(()) if each.grad is None else dtensors.local(each.grad)
            norms[name] = torch.linalg.vector_norm(own, dtype=torch.float64).cpu()
    if not norms:
        return
    stacked = torch.stack(list(norms.values()))
    largest = collectives.all_reduce(stacked, "max", group)
    differ = largest - collectives.all_reduce(stacked, "min", group) > _TOLERANCE * largest
    found = [name for name, is_other in zip(norms, differ.tolist(), strict=True) if is_other]
    if found:
        rest = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(
            f"the gradients of {found[0]} differ on the ranks of a tensor group: parallelize_plan "
            "shards activations where it is used; give its module a style, such as "
            "SequenceParallel(), or replicate its input and output. If they differ by dropout, "
            "give the module that draws it ShardedRandomness() only where activations are "
            f"sharded{rest}"
        )
