"""Weights and optimizer states from a checkpoint into DTensors, each process its part."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import dtensors, stored_tensors
from ..errors import ConfigurationError
from ..optimization import load_optimizer_state, parameter_names
from ..stored_tensors import Stored


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


@torch.no_grad()
def fill(target: Tensor, value: Tensor | Stored) -> None:
    """Fill a tensor, whole or in parts, from a whole one or from one in the same parts."""
    if isinstance(value, Stored):
        value.read_into(target)
    elif dtensors.is_divided(target) and not dtensors.is_divided(value):
        from torch.distributed.tensor import distribute_tensor

        whole: Any = target
        target.copy_(distribute_tensor(value, whole.device_mesh, whole.placements))
    else:
        target.copy_(value)
