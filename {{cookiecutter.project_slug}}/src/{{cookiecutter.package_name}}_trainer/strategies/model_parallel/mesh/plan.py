"""The sizes of a mesh, and the ``parallelize_plan`` of a module: which layers are sharded, and how.

What torch's DTensors compute wrong, or wait for without end, is refused in a forward or backward.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.utils._pytree import tree_leaves

from ....checkpoint import dtensors
from ....errors import ConfigurationError, UserError, nearest
from ....launch import collectives
from ....memory import activation_checkpointing
from ....module import TrainingModule
from . import styles

# Outermost first: neighboring ranks, on the same node, form a tensor group.
DIMENSIONS = ("data", "shard", "tensor")
ATTRIBUTE = "parallelize_plan"
_Layouts = Iterable[Placement | None]
_TOLERANCE = 1e-2  # relative, of norms of equal gradients: a GPU's kernel may sum in any order
_ACTIVATIONS = (  # styles that shard activations, and no parameters
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput,
    styles.ShardedRandomness,
)
# The dimension along which the weight of a layer is sharded.
_DIMENSIONS: list[tuple[type[ParallelStyle], type[nn.Linear | nn.Embedding], int]] = [
    (ColwiseParallel, nn.Linear, 0),
    (RowwiseParallel, nn.Linear, 1),
    (ColwiseParallel, nn.Embedding, 1),
    (RowwiseParallel, nn.Embedding, 0),
]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the dimensions of a mesh, as in :class:`.strategy.Mesh`."""

    data: int = -1
    shard: int = 1
    tensor: int = 1

    styles = styles  # so that plans import nothing of this family, which a project may leave out

    def problems(self) -> list[str]:
        """One line for each error that can be found without the number of processes."""
        lines = [
            f"strategy_options.{name}={size}: give a number above 0, or -1 for all remaining "
            "processes"
            for name, size in self
            if size < 1 and size != -1
        ]
        free = [name for name, size in self if size == -1]
        if len(free) > 1:
            lines.append(f"strategy_options: {' and '.join(free)} are -1; only one size may be")
        return lines

    def on(self, processes: int) -> "Sizes":
        """The sizes on a number of processes, without -1; refused if they do not multiply to it."""
        known = math.prod(size for _, size in self if size != -1)
        free = next((name for name, size in self if size == -1), None)
        sizes = self if free is None else replace(self, **{free: processes // known})
        if math.prod(size for _, size in sizes) == processes:
            return sizes
        shown = " x ".join(f"{name}={size}" for name, size in self if size != 1 or name == "data")
        line = f"{shown}: {processes} processes are not divisible by {known}"
        if free is None:
            line = f"{shown} is a mesh of {known} processes, and there are {processes}"
            line += "; make one size -1, or change devices"
        raise ConfigurationError(f"strategy_options: {line}")

    @property
    def replicas(self) -> int:
        """Number of parts into which a batch is split."""
        return self.data * self.shard

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return ((name, getattr(self, name)) for name in DIMENSIONS)


class Layer(NamedTuple):
    """A module that an entry of a plan names, and its style; ``key``: the name in the plan."""

    key: str
    name: str
    module: nn.Module
    style: ParallelStyle

    @property
    def inner(self) -> ParallelStyle | None:
        """The style of torch; ``None`` if there is only :class:`.styles.ShardedRandomness`."""
        return self.style.style if isinstance(self.style, styles.ShardedRandomness) else self.style

    @property
    def parameters(self) -> list[nn.Parameter]:
        is_plain = self.inner is None or isinstance(self.inner, _ACTIVATIONS)
        return [] if is_plain else list(self.module.parameters())


def _read(module: TrainingModule, sizes: Sizes) -> dict[str, ParallelStyle]:
    """The plan of a module: its attribute, or what its method returns for a mesh of some sizes."""
    plan: Any = getattr(module, ATTRIBUTE, None)
    plan = plan(sizes) if callable(plan) else plan
    if not isinstance(plan, Mapping) or not plan:
        raise UserError(
            f"{type(module).__name__} has no {ATTRIBUTE}, which tensor={sizes.tensor} needs: give "
            "it a dict of styles of torch.distributed.tensor.parallel by the names of its modules, "
            "or use strategy='fsdp'"
        )
    return dict(plan)


def layers(module: TrainingModule, sizes: Sizes) -> list[Layer]:
    """The modules that the plan of a module names, in its order."""
    named = dict(module.named_modules())
    return [
        Layer(key, name, layer, style)
        for key, style in _read(module, sizes).items()
        for name, layer in named.items()
        if activation_checkpointing.matches(name, key)
    ]


def problems_of(module: TrainingModule, sizes: Sizes) -> list[str]:
    """One line for each reason why a module cannot be sharded by its plan."""
    if sizes.tensor == 1:
        return []
    try:
        plan, planned = _read(module, sizes), layers(module, sizes)
    except UserError as error:
        return error.problems
    lines = [
        f"{ATTRIBUTE}[{key!r}] is a {type(style).__name__}: give a style of "
        "torch.distributed.tensor.parallel"
        for key, style in plan.items()
        if not isinstance(style, ParallelStyle)
    ]
    names = [name for name, _ in module.named_modules() if name]
    lines += [
        f"{ATTRIBUTE} names {key!r}, and {type(module).__name__} has no such module"
        f"{nearest(key, names)}"
        for key in plan
        if key not in {layer.key for layer in planned}
    ]
    by_key: dict[str, str] = {}  # the first of each pattern
    for layer in planned:
        if line := _of_layer(layer, sizes.tensor):
            by_key.setdefault(layer.key, line)
    lines += by_key.values()
    if not lines and not any(layer.parameters for layer in planned):
        advice = "give layers a style such as ColwiseParallel(), or use strategy='ddp'"
        lines.append(f"{ATTRIBUTE} of {type(module).__name__} shards no parameter: {advice}")
    return lines + _of_shared(module, planned)


def problems_of_compiling(module: TrainingModule, sizes: Sizes) -> list[str]:
    """One line for each embedding whose mask, a DTensor's, torch cannot compile."""
    return [
        f"compile: torch cannot compile {layer.name}, an embedding that RowwiseParallel shards; "
        "compile blocks: compile={'regional': True}, or use ColwiseParallel()"
        for layer in (layers(module, sizes) if sizes.tensor > 1 else ())
        if isinstance(layer.inner, RowwiseParallel) and isinstance(layer.module, nn.Embedding)
    ]


def _of_layer(layer: Layer, size: int) -> str:
    """One line if torch does not support a layer in a style, or its sizes are not divisible."""
    style = layer.inner
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return ""
    for name, _ in layer.module.named_parameters():
        if name not in ("weight", "bias"):
            return (
                f"{ATTRIBUTE}: {layer.name} computes its weight from {name}, as when it is pruned, "
                "and torch shards no such layer: leave it out, or use strategy='fsdp'"
            )
    for expected, kind, dimension in _DIMENSIONS:
        if isinstance(style, expected) and isinstance(layer.module, kind):
            shape = tuple(layer.module.weight.shape)
            if shape[dimension] % size == 0:
                return ""
            line = f"{layer.name}.weight of shape {shape} is sharded along dimension {dimension}"
            return f"{line}: {shape[dimension]} is not divisible by tensor={size}"
    supported = f"{type(style).__name__} supports nn.Linear and nn.Embedding"
    return f"{ATTRIBUTE}: {layer.name} is a {type(layer.module).__name__}, and {supported}"


def _of_shared(module: nn.Module, planned: list[Layer]) -> list[str]:
    """One line for each parameter with several names that a plan would separate."""
    sharded = {id(parameter) for layer in planned for parameter in layer.parameters}
    uses = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    return [
        f"{name} is used in {uses[id(tensor)]} places, and {ATTRIBUTE} would separate them; leave "
        "it out of the plan, or use strategy='fsdp'"
        for name, tensor in module.named_parameters()
        if uses[id(tensor)] > 1 and id(tensor) in sharded
    ]


def apply(planned: list[Layer], mesh: DeviceMesh, materialize: Callable[[nn.Module], None]) -> None:
    """Shard layers over a tensor group; ``materialize`` creates and moves a layer's parameters."""
    for layer in planned:
        if layer.parameters:
            materialize(layer.module)
        trains = {name: p.requires_grad for name, p in layer.module.named_parameters()}
        if layer.inner is not None:
            _watch_lengths(layer.name, layer.module, layer.inner, mesh.size())
        # The parameters are equal already: each rank takes its shard of its own.
        parallelize_module(layer.module, mesh, layer.style, src_data_rank=None)
        if layer.inner is not None:
            layer.module.register_forward_hook(lambda *called: _first_order(called[-1]))
        for name, parameter in layer.module.named_parameters():
            parameter.requires_grad_(trains[name])


def _watch_lengths(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    """Refuse activations that a style would shard unevenly; called before the style is applied.

    torch's styles pass shards on as plain tensors, and take the length of a shard times the number
    of ranks for the whole length. Ranks would disagree about it, and wait until the timeout.
    """

    def check(what: str, tensors: Iterable[Any], actual: _Layouts, wanted: _Layouts) -> None:
        for tensor, before, after in zip(tensors, actual, wanted, strict=False):
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
                actual = style.input_kwarg_layouts.get(key)
                check(f"input {key}", [named.get(key)], [actual], [wanted])
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
        _watch_lengths(name, module, style.prepare_module_input, size)
        _watch_lengths(name, module, style.prepare_module_output, size)
    else:
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def _first_order(output: Any) -> Any:
    """Refuse gradients of gradients through an output, and return it.

    torch moves gradients between ranks by operations without one; compiled code refuses by itself.
    """
    for tensor in () if torch.compiler.is_compiling() else tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(_refuse_second_order)
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
    """Refuse gradients that differ in a tensor group, of parameters that all of its ranks hold."""
    norms: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is None or "tensor" not in mesh.mesh_dim_names:
            gradient = torch.zeros(()) if parameter.grad is None else dtensors.local(parameter.grad)
            norms[name] = torch.linalg.vector_norm(gradient, dtype=torch.float64).cpu()
    if not norms:
        return
    stacked = torch.stack(list(norms.values()))
    largest = collectives.all_reduce(stacked, "max", group)
    differ = largest - collectives.all_reduce(stacked, "min", group) > _TOLERANCE * largest
    if other := [name for name, is_other in zip(norms, differ.tolist(), strict=True) if is_other]:
        rest = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        raise UserError(
            f"the gradients of {other[0]} differ on the ranks of a tensor group: parallelize_plan "
            "shards activations where it is used; give its module a style, such as "
            "SequenceParallel(), or replicate its input and output. If they differ by dropout, "
            "give the module that draws it ShardedRandomness() only where activations are "
            f"sharded{rest}"
        )
