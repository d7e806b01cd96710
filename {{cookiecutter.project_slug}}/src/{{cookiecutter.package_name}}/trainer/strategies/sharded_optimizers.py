"""Optimizers that each process steps for a share of the parameters: states, and clipped gradients.

Such an optimizer names all parameters in its groups; its own one, ``optim``, has this process'
share of them and their state (``ZeroRedundancyOptimizer``, FairScale's ``OSS``).
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import stored_tensors
from ..checkpoint.state_file import Spread
from ..launch import collectives
from .optimizers import load_optimizer_state


def constructor_options(optimizer: Optimizer) -> dict[str, Any]:
    """What to make another optimizer of its class with, parameters apart."""
    # Some optimizers keep more among their defaults than they take (AdamW: decoupled_weight_decay).
    takes = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in takes}


def state(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """As ``optimization.optimizer_state`` gives it, with this process' share of the parameters."""
    own = optimizer.optim.state
    return {
        "state": Spread({names[id(parameter)]: dict(values) for parameter, values in own.items()}),
        "param_groups": [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def load_state(optimizer: Any, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Put back what any strategy gave for an optimizer, reading this process' share alone.

    Raises:
        ConfigurationError: the saved parameters are not those of this optimizer.
    """
    groups = saved["param_groups"]
    load_optimizer_state(optimizer, {"state": {}, "param_groups": groups}, names)
    inner = optimizer.optim
    own = {names[id(parameter)] for group in inner.param_groups for parameter in group["params"]}
    share = {
        "state": {
            name: stored_tensors.read_all(values)
            for name, values in saved["state"].items()
            if name in own
        },
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in groups
        ],
    }
    load_optimizer_state(inner, share, names)


def clip_gradients(parameters: Sequence[Tensor], value: float, algorithm: str) -> None:
    """Clip gradients of which each process holds other ones: their norm over all, or each value.

    Args:
        parameters: whose gradients lie here; every process calls it, also one that has none.
        value: largest norm, or largest value.
        algorithm: ``"norm"`` or ``"value"``.
    """
    if algorithm == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
        return
    gradients = [each.grad for each in parameters if each.grad is not None]
    own = torch.nn.utils.get_total_norm(gradients).to(parameters[0].device)
    norm = collectives.all_reduce(own.float() ** 2).sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, value, norm)
