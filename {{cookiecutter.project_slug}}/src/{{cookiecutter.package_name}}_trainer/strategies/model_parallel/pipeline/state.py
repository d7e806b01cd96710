"""States of model and optimizers: each process saves and loads those of its stages."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ....checkpoint import Spread, fill, stored_tensors
from ...optimizer_state import (
    group_names,
    load_optimizer_state,
    named_groups,
    parameter_names,
    state_like,
)
from .partition import Ownership


def model_state(module: nn.Module, ownership: Ownership) -> dict[str, Any]:
    """This process' part of a state dict; of what several stages have, the last one's."""
    whole = module.state_dict(keep_vars=True)
    return Spread(
        {
            name: each.detach() if isinstance(each, Tensor) else each
            for name, each in whole.items()
            if not isinstance(each, Tensor) or ownership.counts_here(each)
        }
    )


def load_model(module: nn.Module, ownership: Ownership, saved: Mapping[str, Any]) -> None:
    """Load this process' parameters and buffers.

    Raises:
        ValueError: Names or shapes differ.
    """
    own = module.state_dict(keep_vars=True)
    if saved.keys() != own.keys():
        strange = ", ".join(sorted(saved.keys() ^ own.keys())[:3])
        raise ValueError(f"the checkpoint's model has other tensors than this one ({strange})")
    for name, target in own.items():
        if isinstance(target, Tensor) and ownership.is_own(target):
            if saved[name].shape != target.shape:
                raise ValueError(
                    f"{name} has the shape {tuple(saved[name].shape)} in the checkpoint and "
                    f"{tuple(target.shape)} here"
                )
            fill(target.detach(), saved[name])
    others = {name: saved[name] for name, each in own.items() if not isinstance(each, Tensor)}
    if others:
        module.load_state_dict(stored_tensors.read_all(others), strict=False)


def optimizer_state(
    optimizer: Optimizer, module: nn.Module, ownership: Ownership
) -> dict[str, Any]:
    """An optimizer's state in the form of every strategy, with this process' parameters only."""
    names = parameter_names(module)
    own = {
        names[id(each)]: dict(values)
        for each, values in optimizer.state.items()
        if ownership.counts_here(each)
    }
    groups = named_groups(optimizer.param_groups, group_names(optimizer, names))
    return {"state": Spread(own), "param_groups": groups}


def load_optimizer(
    optimizer: Optimizer, module: nn.Module, ownership: Ownership, saved: Mapping[str, Any]
) -> None:
    """Load an optimizer state of any strategy, reading only this process' part.

    Raises:
        ConfigurationError: The saved parameters are not those of this optimizer.
    """
    own = {name: each for name, each in module.named_parameters() if ownership.is_own(each)}
    share = {
        "state": {
            name: state_like(own[name], values)
            for name, values in saved["state"].items()
            if name in own
        },
        "param_groups": stored_tensors.read_all(saved["param_groups"]),
    }
    load_optimizer_state(optimizer, share, parameter_names(module))
