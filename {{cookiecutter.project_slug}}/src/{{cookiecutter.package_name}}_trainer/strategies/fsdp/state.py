"""Load model and optimizer states of a checkpoint into DTensors, each process its shards.

Tensors that are not sharded are moved to the device as well.
"""

from collections.abc import Mapping
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


def load_model(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a module's parameters and buffers.

    Args:
        module: A module with some DTensor parameters.
        saved: A state dict, with stored or loaded tensors.

    Raises:
        ValueError: Names or shapes differ.
    """
    own = module.state_dict()
    if saved.keys() != own.keys():
        strange = ", ".join(sorted(saved.keys() ^ own.keys())[:3])
        raise ValueError(f"the checkpoint's model has other tensors than this one ({strange})")
    for name, target in own.items():
        if isinstance(target, Tensor):
            fill(target, saved[name])
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
