"""States of model and optimizers: each process saves and loads those of its stages."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint import Spread, fill, stored_tensors
from ..optimizer_state import (
    check_groups,
    group_names,
    load_optimizer_state,
    named_groups,
    parameter_names,
    state_like,
)
from .partition import Ownership

# Per parameter, beside "params", in optimizers that were given named parameters.
_NAMES = "param_names"


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


class OwnParameters:
    """Restricts an optimizer to the parameters of this process, and remembers the others' names.

    Args:
        optimizer: The user's optimizer, of the whole module.
        module: The user's module.
        ownership: Which process has which parameter.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, ownership: Ownership) -> None:
        self.optimizer = optimizer
        self._names = parameter_names(module)
        self._ownership = ownership
        self._groups = group_names(optimizer, self._names)
        self._also = [list(group.get(_NAMES, ())) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            kept = [ownership.is_own(each) for each in group["params"]]
            for key in ("params", _NAMES):
                if key in group:
                    group[key] = _where(group[key], kept)
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for parameter in [each for each in optimizer.state if id(each) not in own]:
            del optimizer.state[parameter]

    def state(self) -> dict[str, Any]:
        """The state in the form of every strategy, with this process' parameters only."""
        own = {
            each: values
            for each, values in self.optimizer.state.items()
            if self._ownership.counts_here(each)
        }
        groups = named_groups(self.optimizer.param_groups, self._groups)
        for group, names in zip(groups, self._also, strict=True):
            if _NAMES in group:
                group[_NAMES] = names
        return {
            "state": Spread({self._names[id(each)]: dict(values) for each, values in own.items()}),
            "param_groups": groups,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load a state of any strategy, reading only this process' part.

        Raises:
            ConfigurationError: The saved parameters are not those of this optimizer.
        """
        check_groups(saved["param_groups"], self._groups)
        groups = self.optimizer.param_groups
        named = zip(group_names(self.optimizer, self._names), groups, strict=True)
        mine = {
            name: each
            for names, group in named
            for name, each in zip(names, group["params"], strict=True)
        }
        share = {
            "state": {
                name: state_like(mine[name], values)
                for name, values in saved["state"].items()
                if name in mine
            },
            "param_groups": [_restricted(group, set(mine)) for group in saved["param_groups"]],
        }
        load_optimizer_state(self.optimizer, share, self._names)


def _restricted(group: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    kept = [name in names for name in group["params"]]
    lists = {key: _where(group[key], kept) for key in ("params", _NAMES) if key in group}
    return {**stored_tensors.read_all(dict(group)), **lists}


def _where(values: Sequence[Any], kept: Sequence[bool]) -> list[Any]:
    return [value for value, keep in zip(values, kept, strict=True) if keep]
