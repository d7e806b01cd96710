"""Place what is not sharded, and step DTensors of several meshes."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import UserError
from ...module import TrainingModule
from ..optimizers import replace_kept
from .units import can_shard


def hooked(module: nn.Module) -> list[str]:
    """One line for each parameter with hooks of its gradient, which its shard would not have."""
    return [
        f"{name} has a hook of its gradient (register_hook), which shards do not have: change "
        "gradients in on_before_optimizer_step, or use strategy='ddp'"
        for name, each in module.named_parameters()
        if each._backward_hooks or each._post_accumulate_grad_hooks
    ]


def follow(module: TrainingModule, before: Mapping[str, Any]) -> None:
    """Let shards have the attributes of their parameters, and be in lists that modules keep."""
    shards: dict[int, Any] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        if each is not before[name]:
            vars(each).update(vars(before[name]))
            shards[id(before[name])] = each
    replace_kept(module, shards)


def read_number(operation: Callable[[Tensor], Any], given: tuple[Any, ...], _: Any) -> Any:
    """Refuse to read a number of a DTensor that is not whole, of which torch gives a part."""
    if not all(each.is_replicate() for each in given[0].placements):
        raise UserError(
            "a number is read of a sharded tensor (item(), float() or if), of which this process "
            "has a part: take it of its full_tensor(), on every rank"
        )
    return operation(given[0].to_local())


def move_rest(module: nn.Module, device: torch.device) -> None:
    """Move everything in a module except the parameters that are about to be sharded.

    Those are moved one unit at a time. The rest are buffers, parameters without dimensions, and
    other state that modules move themselves, such as that of torchmetrics.

    Args:
        module: The module, not sharded yet.
        device: Target device.
    """
    for each in module.parameters():
        each.grad = None  # it would move without its parameter, and is not sharded with it

    def move(tensor: Tensor) -> Tensor:
        is_sharded_later = isinstance(tensor, nn.Parameter) and can_shard(tensor)
        return tensor if is_sharded_later or tensor.is_meta else tensor.to(device)

    module._apply(move)


@contextlib.contextmanager
def groups_split(optimizer: Optimizer) -> Iterator[None]:
    """Split the parameter groups of an optimizer by mesh in this context, for its step.

    torch's foreach and fused optimizers need all parameters of a group on one mesh.
    """
    groups = optimizer.param_groups
    parts = [_split(group) for group in groups]
    if all(len(own) <= 1 for own in parts):
        yield
        return
    optimizer.param_groups = [part for own in parts for part in own]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, own in zip(groups, parts, strict=True):
            # Some optimizers keep a state in their groups, which may be empty.
            for part in own[:1]:
                group.update({key: value for key, value in part.items() if key != "params"})


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
    return [{**group, "params": own} for own in by_mesh.values()]
