"""Place what is not sharded, and step DTensors of several meshes."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .units import can_shard


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
