"""Optimizer state by parameter name, which is the same with every strategy.

Why not ``torch.distributed.checkpoint.state_dict``: to save before the first step, it steps the
optimizer; it loads no parameter without a gradient, and drops the state of frozen ones. The
template's ``tests/trainer/loop/test_optimization.py`` shows these points, and more.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import ShardedDict, Stored, dtensors, fill, stored_tensors
from ..errors import ConfigurationError, UserError

# Keys of torch's parameter groups that select an implementation, not the result.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
_OF_TORCH = {"state", "param_groups"}
STEPS_SHARD = "steps_shard"  # an attribute of optimizers that step a shard of the parameters


def parameter_names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The names of the parameters in each parameter group, of ``names`` by ``id``.

    A parameter that the module does not own is named by its index in the optimizer: ``"#3"``.
    """
    groups: list[list[str]] = []
    place = 0
    for group in optimizer.param_groups:
        numbered = enumerate(group["params"], place)
        groups.append([names.get(id(parameter), f"#{index}") for index, parameter in numbered])
        place += len(group["params"])
    return groups


def named_groups(
    groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Parameter groups with parameter names, as in a checkpoint."""
    return [{**group, "params": list(params)} for group, params in zip(groups, names, strict=True)]


def check_groups(saved: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> None:
    """Check that a checkpoint's groups have the parameters of an optimizer's, in any order."""
    theirs = [set(group["params"]) for group in saved]
    ours = [set(members) for members in names]
    if set().union(*theirs) != set().union(*ours):
        strange = ", ".join(sorted(set().union(*theirs) ^ set().union(*ours))[:3])
        problem = f"has other parameters than this one ({strange})"
        raise ConfigurationError(f"the checkpoint's optimizer {problem}")
    if theirs != ours:
        raise ConfigurationError("the checkpoint's optimizer groups its parameters differently")


def add_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], module: nn.Module) -> None:
    """Add the groups that a hook had added before a checkpoint, by ``add_param_group``."""
    named = dict(module.named_parameters())
    known = {id(member) for group in optimizer.param_groups for member in group["params"]}
    for group in saved[len(optimizer.param_groups) :]:
        members = [named[name] for name in group["params"] if name in named]
        if known.isdisjoint(map(id, members)) and len(members) == len(group["params"]):
            optimizer.add_param_group({**stored_tensors.read_all(group), "params": members})


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Any torch optimizer's state by parameter name; ``names``: by ``id`` of the parameter.

    Of one that steps a shard of the parameters, with this process' shard only.
    """
    groups = group_names(optimizer, names)
    if STEPS_SHARD in vars(optimizer):
        inner: Any = vars(optimizer)["optim"]
        shard = {names[id(parameter)]: dict(values) for parameter, values in inner.state.items()}
        named = named_groups(optimizer.param_groups, groups)
        return {"state": ShardedDict(shard), "param_groups": named}
    by_index = [name for group in groups for name in group]
    try:
        state = optimizer.state_dict()
    except KeyError:  # torch's, of a parameter's id
        problem = "has the state of a parameter that is in none of its groups"
        advice = "remove it from optimizer.state, too"
        raise UserError(f"{type(optimizer).__name__} {problem}: {advice}") from None
    values = {  # an optimizer may keep more, by names of its own
        by_index[key] if isinstance(key, int) else key: copy.copy(value)
        for key, value in state["state"].items()
    }
    return {**state, "state": values, "param_groups": named_groups(state["param_groups"], groups)}


def load_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """Load a state of :func:`optimizer_state`; stored tensors are read one at a time.

    Each is read to the device of its parameter; of a DTensor, only what this rank's shard needs.
    """
    is_shard, own_names = STEPS_SHARD in vars(optimizer), group_names(optimizer, names)
    check_groups(state["param_groups"], own_names)
    indices = {name: index for index, name in enumerate(name for row in own_names for name in row)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved_groups = stored_tensors.read_all(state["param_groups"])
    pairs = zip(optimizer.param_groups, saved_groups, own_names, strict=True)
    groups = [
        # torch matches parameters by position, so the order must be that of this optimizer.
        {**saved, **implementation(group), "params": [indices[name] for name in members]}
        for group, saved, members in pairs
    ]
    by_index = {
        indices.get(name, name): _state_like(parameters[indices[name]], values)
        if name in indices
        else stored_tensors.read_all(values)
        for name, values in ({} if is_shard else state["state"]).items()
    }
    options = [set(group) for group in optimizer.param_groups]
    rest = stored_tensors.read_all({key: state[key] for key in state.keys() - _OF_TORCH})
    optimizer.load_state_dict({**rest, "state": by_index, "param_groups": groups})
    for before, group in zip(options, optimizer.param_groups, strict=True):
        if missing := before - group.keys():
            problem = f"{type(optimizer).__name__}: it has no {min(missing)!r}"
            advice = "use the optimizer of the checkpoint, or start a new run with weights=PATH"
            raise ConfigurationError(f"its optimizer is not {problem}; {advice}")
    if is_shard:
        inner: Any = vars(optimizer)["optim"]
        _load_shard(inner, state, names)
        optimizer.state = inner.state


def shard_state(optimizer: Optimizer) -> None:
    """Shard a state that ``configure_optimizers`` has loaded whole, as its parameters are."""
    for parameter, values in optimizer.state.items():
        if dtensors.is_sharded(parameter) and not any(map(dtensors.is_sharded, values.values())):
            optimizer.state[parameter] = _state_like(parameter, values)


def _state_like(parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    is_sharded, state = dtensors.is_sharded(parameter), dict[str, Any]()
    for key, value in values.items():
        # torch decides where the step count is kept, which has no dimensions.
        has_elements = isinstance(value, Tensor | Stored) and len(value.shape) > 0
        if not has_elements or not (is_sharded or isinstance(value, Stored)):
            state[key] = stored_tensors.read_all(value)
        elif value.shape == parameter.shape:
            state[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            fill(state[key], value)
        elif is_sharded:
            problem = "has another shape than its parameter, and cannot be sharded like it"
            advice = "load the checkpoint under strategy='ddp'"
            raise ConfigurationError(f"the optimizer's {key!r} {problem}; {advice}")
        else:
            state[key] = value.read()
    return state


def implementation(group: Mapping[str, Any]) -> dict[str, Any]:
    """The implementation options of a group, which belong to this run and not to a checkpoint."""
    return {name: group[name] for name in IMPLEMENTATION if name in group}


def _load_shard(inner: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    held = {names[id(parameter)] for group in inner.param_groups for parameter in group["params"]}
    share = {
        "state": {name: values for name, values in saved["state"].items() if name in held},
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name in held]}
            for group in saved["param_groups"]
        ],
    }
    load_optimizer_state(inner, share, names)
