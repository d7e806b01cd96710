"""Weights and optimizer states from a checkpoint into DTensors, each process its part.

Beside them lies what is not divided, which must be on the device as well.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint import stored_tensors
from ...checkpoint.stored_tensors import Stored, fill
from ...errors import ConfigurationError
from ..optimizer_state import load_optimizer_state, parameter_names


def move_rest(module: nn.Module, device: torch.device) -> None:
    """Move all that a module holds but the parameters that are about to be divided.

    Those go to the device a unit at a time. The rest are buffers, parameters without dimensions,
    and what modules hold besides and move by themselves, such as the sums of torchmetrics.

    Args:
        module: before it is divided.
        device: where to.
    """
    for each in module.parameters():
        each.grad = None  # which would move without its parameter, and is not divided with it

    def move(tensor: Tensor) -> Tensor:
        is_sharded_later = isinstance(tensor, nn.Parameter) and tensor.dim() > 0
        return tensor if is_sharded_later or tensor.is_meta else tensor.to(device)

    module._apply(move)


def load_model(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Fill a module's parameters and buffers.

    Args:
        module: some of whose parameters are DTensors.
        saved: as ``state_dict`` gives them, stored or read.

    Raises:
        ValueError: other names or other shapes.
    """
    own = module.state_dict()
    if saved.keys() != own.keys():
        strange = ", ".join(sorted(saved.keys() ^ own.keys())[:3])
        raise ValueError(f"the checkpoint's model holds other tensors than this one ({strange})")
    for name, target in own.items():
        if isinstance(target, Tensor):
            fill(target, saved[name])
    others = {name: saved[name] for name, each in own.items() if not isinstance(each, Tensor)}
    if others:
        module.load_state_dict(stored_tensors.read_all(others), strict=False)


def load_optimizer(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Fill an optimizer of DTensors.

    Raises:
        ConfigurationError: the checkpoint's is of other parameters, or of a kind whose state
            cannot be divided as its parameter is.
    """
    parameters = dict(module.named_parameters())
    state = {
        name: {key: _divided(parameters.get(name), key, value) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    load_optimizer_state(optimizer, {**saved, "state": state}, parameter_names(module))


def _divided(parameter: Tensor | None, key: str, value: Any) -> Any:
    """A parameter's state, divided as the parameter is."""
    if parameter is None or not isinstance(value, Tensor | Stored) or not len(value.shape):
        return stored_tensors.read_all(value)
    if value.shape != parameter.shape:
        raise ConfigurationError(
            f"the optimizer's {key!r} has another shape than its parameter, and cannot be divided "
            "as that is; load the checkpoint under strategy='ddp'"
        )
    target = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    fill(target, value)
    return target
