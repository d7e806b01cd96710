"""The ``parallelize_plan`` of a module: which layers are sharded over a tensor group, and how."""

from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from ....errors import UserError, nearest
from ....module import TrainingModule
from . import refusals
from .sizes import Sizes
from .styles import ShardedRandomness

ATTRIBUTE = "parallelize_plan"

# Styles that shard activations, and no parameters.
_ACTIVATIONS = (
    PrepareModuleInput,
    PrepareModuleOutput,
    PrepareModuleInputOutput,
    ShardedRandomness,
)
# The dimension along which the weight of a layer is sharded.
_DIMENSIONS: list[tuple[type[ParallelStyle], type[nn.Linear | nn.Embedding], int]] = [
    (ColwiseParallel, nn.Linear, 0),
    (RowwiseParallel, nn.Linear, 1),
    (ColwiseParallel, nn.Embedding, 1),
    (RowwiseParallel, nn.Embedding, 0),
]


class Layer(NamedTuple):
    """A module that an entry of a plan names, and its style; ``key``: the name in the plan."""

    key: str
    name: str
    module: nn.Module
    style: ParallelStyle

    @property
    def inner(self) -> ParallelStyle | None:
        """The style of torch; ``None`` if there is only :class:`ShardedRandomness`."""
        return self.style.style if isinstance(self.style, ShardedRandomness) else self.style

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that become DTensors."""
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
    """The modules that the plan of a module names, in its order.

    Raises:
        UserError: The module has no plan, or refuses the sizes.
    """
    named = dict(module.named_modules())
    return [
        Layer(key, name, each, style)
        for key, style in _read(module, sizes).items()
        for name, each in named.items()
        if _matches(name.split("."), key.split("."))
    ]


def _matches(parts: list[str], patterns: list[str]) -> bool:
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def problems_of(module: TrainingModule, sizes: Sizes) -> list[str]:
    """One line for each reason why a module cannot be sharded by its plan."""
    if sizes.tensor == 1:
        return []
    try:
        plan, found = _read(module, sizes), layers(module, sizes)
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
        if key not in {layer.key for layer in found}
    ]
    by_key: dict[str, str] = {}  # the first of each pattern
    for layer in found:
        if line := _of_layer(layer, sizes.tensor):
            by_key.setdefault(layer.key, line)
    lines += by_key.values()
    if not lines and not any(layer.parameters for layer in found):
        lines.append(
            f"{ATTRIBUTE} of {type(module).__name__} shards no parameter: give layers a style such "
            "as ColwiseParallel(), or use strategy='ddp'"
        )
    return lines + _of_shared(module, found)


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
    for each, kind, dimension in _DIMENSIONS:
        if isinstance(style, each) and isinstance(layer.module, kind):
            shape = tuple(layer.module.weight.shape)
            if shape[dimension] % size == 0:
                return ""
            return (
                f"{layer.name}.weight of shape {shape} is sharded along dimension {dimension}: "
                f"{shape[dimension]} is not divisible by tensor={size}"
            )
    return (
        f"{ATTRIBUTE}: {layer.name} is a {type(layer.module).__name__}, and "
        f"{type(style).__name__} supports nn.Linear and nn.Embedding"
    )


def _of_shared(module: nn.Module, found: list[Layer]) -> list[str]:
    """One line for each parameter with several names that a plan would separate."""
    sharded = {id(each) for layer in found for each in layer.parameters}
    uses = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    return [
        f"{name} is used in {uses[id(each)]} places, and {ATTRIBUTE} would separate them; leave "
        "it out of the plan, or use strategy='fsdp'"
        for name, each in module.named_parameters()
        if uses[id(each)] > 1 and id(each) in sharded
    ]


def apply(found: list[Layer], mesh: DeviceMesh, materialize: Callable[[nn.Module], None]) -> None:
    """Shard layers over a tensor group; ``materialize`` creates and moves a layer's parameters."""
    for layer in found:
        if layer.parameters:
            materialize(layer.module)
        trains = {name: each.requires_grad for name, each in layer.module.named_parameters()}
        if layer.inner is not None:
            refusals.watch_lengths(layer.name, layer.module, layer.inner, mesh.size())
        # The parameters are equal already: each rank takes its shard of its own.
        parallelize_module(layer.module, mesh, layer.style, src_data_rank=None)
        if layer.inner is not None:
            layer.module.register_forward_hook(lambda *called: refusals.first_order(called[-1]))
        for name, each in layer.module.named_parameters():
            each.requires_grad_(trains[name])
