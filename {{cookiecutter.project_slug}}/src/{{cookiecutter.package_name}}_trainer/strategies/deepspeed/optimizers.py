"""DeepSpeed's one optimizer and one scheduler, from its configuration or from the code.

Source: https://www.deepspeed.ai/docs/config-json/#optimizer-parameters
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ...errors import ConfigurationError, refuse
from ...module import TrainingModule
from .. import elementwise
from ..optimizers import Optimization, SchedulerConfig
from . import settings
from .onebit_adam import OneBitAdam


def configured(
    config: Mapping[str, Any], module: TrainingModule, configure: Callable[[], Optimization]
) -> Optimization:
    """Check the module's optimizers; empty if the configuration has an optimizer."""
    found, named = Optimization([], []), settings.kind(config, "optimizer")
    has_none = type(module).configure_optimizers is TrainingModule.configure_optimizers
    if named is None or not has_none:
        found = configure()
        refuse(problems_of(found, config))
    if named is not None:
        return Optimization([], [])
    if settings.kind(config, "scheduler") is not None:
        return Optimization(found.optimizers, [])
    return found


def problems_of(found: Optimization, config: Mapping[str, Any]) -> list[str]:
    """One line for each property of optimizers and schedulers that DeepSpeed does not support."""
    lines = [
        f"configure_optimizers gave {len(given)} {what}, and DeepSpeed steps one optimizer with "
        f"one scheduler; {instead}, or use strategy='ddp'"
        for given, what, instead in (
            (found.optimizers, "optimizers", "put their parameters into groups of one"),
            (found.schedulers, "schedulers", "chain them in a SequentialLR"),
        )
        if len(given) > 1
    ]
    has_own = settings.kind(config, "optimizer") is not None
    if has_own and found.schedulers and settings.kind(config, "scheduler") is None:
        lines.append(
            "the DeepSpeed configuration's optimizer replaces the one whose rates the scheduler of "
            "configure_optimizers sets; give a scheduler there too, or leave the optimizer out"
        )
    if settings.stage(config) and not has_own:
        lines += _not_sliced(found.optimizers, config)
    return lines


def _not_sliced(found: Sequence[Optimizer], config: Mapping[str, Any]) -> list[str]:
    """One line for each optimizer that cannot step slices of parameters."""
    is_tested = not config.get("zero_allow_untested_optimizer")
    examined, what = f"{elementwise.EXAMINED}|deepspeed", "ZeRO (strategy='deepspeed')"
    unknown = elementwise.problems_of(found, "elements", what, examined) if is_tested else []
    return unknown or [
        f"configure_optimizers gave {type(each).__name__}, which has a state before its first "
        "step, and ZeRO replaces its parameters by slices; create the state in step, or use "
        "strategy='ddp'"
        for each in found
        if _has_tensors(each) and type(each) is not torch.optim.Adagrad  # which it creates again
    ]


def _has_tensors(optimizer: Optimizer) -> bool:
    """Whether it, or an optimizer in it, keeps tensors beside parameters, such as copies."""
    names = vars(optimizer).keys() - {"param_groups", "defaults"}
    kept = tree_leaves([vars(optimizer)[name] for name in names])
    inner = any(_has_tensors(each) for each in kept if isinstance(each, Optimizer))
    return inner or any(isinstance(each, Tensor) and each.ndim for each in kept)


def one_bit_adam(config: Mapping[str, Any], module: TrainingModule) -> Optimizer:
    """Create the optimizer of a configuration with type ``OneBitAdam``."""
    given = dict(settings.section(config["optimizer"], "params"))
    for name in ("cuda_aware", "comm_backend_name"):  # options of DeepSpeed's own communication
        given.pop(name, None)
    trained = [each for each in module.parameters() if each.requires_grad]
    made: Optimizer = _made("OneBitAdam", OneBitAdam, trained, given)
    return made


def configured_scheduler(config: Mapping[str, Any], optimizer: Optimizer) -> list[SchedulerConfig]:
    """Create the scheduler that a configuration names; an empty list if there is none."""
    name = settings.kind(config, "scheduler")
    if name is None:
        return []
    from deepspeed.runtime import lr_schedules

    make = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    made = _made(name, make, optimizer, settings.section(config["scheduler"], "params"))
    return [SchedulerConfig(made, interval="step")]


def _made(name: str, make: Callable[..., Any], of: Any, params: Mapping[str, Any]) -> Any:
    try:
        return make(of, **params)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} in the DeepSpeed configuration: {error}") from None
