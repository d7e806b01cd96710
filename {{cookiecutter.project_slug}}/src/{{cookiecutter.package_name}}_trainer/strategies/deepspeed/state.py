"""Convert ZeRO's sharded state to the form of all strategies: full tensors by parameter name.

Parameters are gathered on one process after the other, so that none ever holds all of them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...checkpoint import ShardedDict, Stored, fill_module, read_all
from ...errors import ConfigurationError
from ...launch import collectives
from ..optimizer_state import check_groups, implementation, named_groups
from .slices import FlatSlices, ParameterSlices, Slice

_STEPS = "step"  # Adam's step count; may be a tensor


class ShardedState:
    """Weights and optimizer state of a ZeRO optimizer; ``groups``: its parameters' names."""

    def __init__(
        self,
        module: nn.Module,
        slices: FlatSlices | ParameterSlices,
        optimizer: Optimizer,
        groups: list[list[str]],
    ) -> None:
        self._module, self._slices = module, slices
        self._optimizer, self._groups = optimizer, groups
        self._parameters = dict(module.named_parameters())
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        # Parameters with several names: each name with the first one.
        self._aliases = {
            name: first[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }

    # --- save ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State in the form of ``Strategy.state``."""
        groups = named_groups(self._optimizer.param_groups, self._groups)
        return {
            "model": self._weights(),
            "optimizers": [{"state": self._values(), "param_groups": groups}],
        }

    def _weights(self) -> dict[str, Any]:
        state = dict(self._module.state_dict())
        if isinstance(self._slices, FlatSlices):
            return state
        own = ShardedDict()
        for index, (name, parameter) in enumerate(self._parameters.items()):
            part = self._slices.weights(parameter)
            whole = _gather(index, part, part.flat, self._slices.shape(parameter))
            if whole is not None:
                own.update({alias: whole for alias, of in self._aliases.items() if of == name})
        if collectives.rank() == 0:
            own.update({name: state[name] for name in state if name not in self._aliases})
        return own

    def _values(self) -> ShardedDict:
        own = ShardedDict()
        names = itertools.chain.from_iterable(self._groups)
        for index, (name, part) in enumerate(self._trained(names)):
            shape = self._slices.shape(self._parameters[name])
            values: dict[str, Any] = self._optimizer.state.get(part.flat, {})
            whole = {key: values[key] for key in sorted(values)}
            for key, value in whole.items():
                if isinstance(value, Tensor) and value.shape == part.flat.shape:
                    whole[key] = _gather(index, part, value, shape)
            if whole and _keeps(index):
                own[name] = whole
        return own

    def _trained(self, names: Iterable[str]) -> Iterator[tuple[str, Slice]]:
        for name in names:
            if (part := self._slices.of(self._parameters[name])) is not None:
                yield name, part

    # --- load ------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state of any strategy."""
        if isinstance(self._slices, ParameterSlices):
            self._load_parts(state["model"], self._slices)
        else:
            fill_module(self._module, state["model"])
            for name, part in self._trained(self._parameters):
                part.within(part.flat.data).copy_(part.cut(self._parameters[name].data))
        (saved,) = state["optimizers"]
        check_groups(saved["param_groups"], self._groups)
        for group, values in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            given = {key: read_all(values[key]) for key in values if key != "params"}
            group.update(given | implementation(group))
        self._load_values(saved["state"])

    def _load_parts(self, model: Mapping[str, Any], slices: ParameterSlices) -> None:
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        # For their names only: the tensors have no elements outside of a step.
        fill_module(self._module, {name: parameters.get(name, model[name]) for name in model})
        for name, parameter in self._parameters.items():
            whole, shape = model[name], slices.shape(parameter)
            if whole.shape != shape:
                raise ConfigurationError(
                    f"{name} has the shape {tuple(whole.shape)} in the checkpoint and "
                    f"{tuple(shape)} here"
                )
            weights = slices.weights(parameter)
            own = weights.cut(whole)
            for part in (weights, slices.of(parameter)):
                if part is not None:
                    part.within(part.flat.data).copy_(own)
            if parameter.shape == shape:  # small parameters are also kept in full
                parameter.data.copy_(whole)

    def _load_values(self, saved: Mapping[str, Any]) -> None:
        self._optimizer.state.clear()
        # In stage 3, an optimizer's groups contain their parameters only during a step.
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name, part in self._trained(names):
                shape = self._slices.shape(self._parameters[name])
                for key, value in saved.get(name, {}).items():
                    self._load_value(part, key, value, shape)
                if _STEPS in (values := self._optimizer.state[part.flat]):
                    values[_STEPS] = step_of(self._optimizer, group, values[_STEPS], part.flat)
        self._slices.relink()

    def _load_value(self, part: Slice, key: str, value: Any, shape: torch.Size) -> None:
        values = self._optimizer.state[part.flat]
        is_tensor = isinstance(value, Tensor | Stored) and key != _STEPS
        if not is_tensor or value.shape != shape:
            values[key] = read_all(value)
            return
        if key not in values:
            values[key] = torch.zeros_like(part.flat.data, dtype=value.dtype)
        part.within(values[key]).copy_(part.cut(value))


def _keeps(index: int) -> bool:
    """Whether this process gathers the parameter with this index."""
    return index % collectives.world_size() == collectives.rank()


def _gather(index: int, part: Slice, flat: Tensor, shape: torch.Size) -> Tensor | None:
    """Gather a full tensor from all slices, on the process that keeps it; ``None`` elsewhere."""
    whole = flat.new_zeros(shape.numel())
    whole.narrow(0, part.offset, part.length).copy_(part.within(flat))
    dist.reduce(whole, dst=index % collectives.world_size())
    return whole.view(shape).cpu() if _keeps(index) else None


def step_of(optimizer: Optimizer, group: Mapping[str, Any], step: Any, flat: Tensor) -> Any:
    """A loaded step count as an optimizer stores it: torch's in tensors, DeepSpeed's not."""
    home = type(optimizer).__module__.partition(".")[0]
    if home == "deepspeed":
        return int(step)
    if home == "torch":
        is_on_device = group.get("fused") or group.get("capturable")
        return torch.as_tensor(step, device=flat.device if is_on_device else None).float()
    return step
