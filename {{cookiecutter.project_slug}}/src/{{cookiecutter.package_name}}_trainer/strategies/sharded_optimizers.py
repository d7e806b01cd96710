"""The state of optimizers that step a shard of the parameters on each process.

Such an optimizer has all parameters in its groups; its inner optimizer, ``optim``, has this
process' shard of them and their state (torch's ``ZeroRedundancyOptimizer``, and similar ones).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.optim import Optimizer

from ..checkpoint import ShardedDict
from ..errors import ConfigurationError, one_line
from .optimizer_state import group_names, load_optimizer_state, named_groups

T = TypeVar("T", bound=Optimizer)


def created(sharded: Callable[..., T], optimizer: Optimizer) -> T:
    """Create a sharded optimizer, whose inner one has the class and options of the user's.

    Raises:
        ConfigurationError: The user's cannot be created again; some wrap another one.
    """
    kind, groups = type(optimizer), [dict(group) for group in optimizer.param_groups]
    # Some optimizers have defaults that are no arguments (AdamW: decoupled_weight_decay).
    takes = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in takes}
    try:
        return sharded(groups, kind, **options)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise ConfigurationError(
            f"configure_optimizers gave {kind.__name__}, which cannot be created again from its "
            f"settings for a shard of the parameters ({one_line(error)}); use strategy='ddp'"
        ) from None


def state(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The state in the form of :func:`optimizer_state`, with this process' shard only."""
    own = optimizer.optim.state
    return {
        "state": ShardedDict(
            {names[id(parameter)]: dict(values) for parameter, values in own.items()}
        ),
        "param_groups": named_groups(optimizer.param_groups, group_names(optimizer, names)),
    }


def load_state(optimizer: Any, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Load an optimizer state of any strategy, reading only this process' shard.

    Raises:
        ConfigurationError: The saved parameters are not those of this optimizer.
    """
    groups = saved["param_groups"]
    load_optimizer_state(optimizer, {"state": {}, "param_groups": groups}, names)
    inner = optimizer.optim
    own = {names[id(parameter)] for group in inner.param_groups for parameter in group["params"]}
    share = {
        "state": {name: values for name, values in saved["state"].items() if name in own},
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name in own]}
            for group in groups
        ],
    }
    load_optimizer_state(inner, share, names)
