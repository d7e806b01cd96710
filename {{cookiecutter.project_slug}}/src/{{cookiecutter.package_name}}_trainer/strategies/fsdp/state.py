"""Load model and optimizer states of a checkpoint into DTensors, each process its shards.

Tensors that are not sharded are moved to the device as well.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint import fill, stored_tensors
from ..optimizer_state import load_optimizer_state, parameter_names, state_like
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


def load_model(
    module: nn.Module, saved: Mapping[str, Any], is_own: Callable[[Tensor], bool] = lambda _: True
) -> None:
    """Load a module's parameters and buffers.

    Args:
        module: A module with some DTensor parameters.
        saved: A state dict, with stored or loaded tensors.
        is_own: Whether this process has a tensor; others are not loaded.

    Raises:
        ValueError: Names or shapes differ.
    """
    own = module.state_dict(keep_vars=True)
    if saved.keys() != own.keys():
        strange = ", ".join(sorted(saved.keys() ^ own.keys())[:3])
        raise ValueError(f"the checkpoint's model has other tensors than this one ({strange})")
    for name, target in own.items():
        if isinstance(target, Tensor) and is_own(target):
            fill(target.detach(), saved[name])
    others = {name: saved[name] for name, each in own.items() if not isinstance(each, Tensor)}
    if others:
        module.load_state_dict(stored_tensors.read_all(others), strict=False)


def load_optimizer(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer of DTensors.

    Raises:
        ConfigurationError: The checkpoint has other parameters, or optimizer state that cannot be
            sharded like its parameter.
    """
    parameters = dict(module.named_parameters())
    state = {
        name: state_like(parameters.get(name), values) for name, values in saved["state"].items()
    }
    load_optimizer_state(optimizer, {**saved, "state": state}, parameter_names(module))


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
            # Some optimizers keep a state in their groups; a stage may have no parameter of one.
            for part in own[:1]:
                group.update({key: value for key, value in part.items() if key != "params"})


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    by_mesh: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
    return [{**group, "params": own} for own in by_mesh.values()]
