"""DeepSpeed's one optimizer and one scheduler, from its configuration or from the code.

Source: https://www.deepspeed.ai/docs/config-json/#optimizer-parameters
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...errors import ConfigurationError
from ...module import TrainingModule
from .. import elementwise
from ..optimizers import Optimization, SchedulerConfig
from . import settings
from .onebit_adam import OneBitAdam

_ONE = "DeepSpeed steps one optimizer with one scheduler"


def configured(
    config: Mapping[str, Any], module: TrainingModule, configure: Callable[[], Optimization]
) -> Optimization:
    """Check the module's optimizers; empty if the configuration has an optimizer.

    Raises:
        ConfigurationError: Several optimizers or schedulers, or an optimizer that cannot be
            sharded.
    """
    named = settings.kind(config, "optimizer")
    if named is not None and _has_none(module):
        return Optimization([], [])
    found = configure()
    problems = problems_of(found, config)
    if problems:
        raise ConfigurationError(problems)
    if named is not None:
        return Optimization([], [])
    if settings.kind(config, "scheduler") is not None:
        return Optimization(found.optimizers, [])
    return found


def problems_of(found: Optimization, config: Mapping[str, Any]) -> list[str]:
    """One line for each property of optimizers and schedulers that DeepSpeed does not support."""
    lines = []
    if len(found.optimizers) > 1:
        lines.append(
            f"configure_optimizers gave {len(found.optimizers)} optimizers, and {_ONE}; put "
            "their parameters into groups of one, or use strategy='ddp'"
        )
    if len(found.schedulers) > 1:
        lines.append(
            f"configure_optimizers gave {len(found.schedulers)} schedulers, and {_ONE}; chain them "
            "in a torch.optim.lr_scheduler.SequentialLR, or use strategy='ddp'"
        )
    by_config = {
        name: settings.kind(config, name) is not None for name in ("optimizer", "scheduler")
    }
    if by_config["optimizer"] and found.schedulers and not by_config["scheduler"]:
        lines.append(
            "the DeepSpeed configuration's optimizer replaces the one whose rates the scheduler of "
            "configure_optimizers sets; give a scheduler there too, or leave the optimizer out"
        )
    if settings.stage(config) and not by_config["optimizer"]:
        lines += _not_sliced(found.optimizers, config)
    return lines


def _not_sliced(found: Sequence[Optimizer], config: Mapping[str, Any]) -> list[str]:
    """One line for each optimizer that cannot step slices of parameters."""
    lines = [
        f"configure_optimizers gave {type(each).__name__}, which has a state before its first "
        "step, and ZeRO replaces its parameters by slices; create the state in step, or use "
        "strategy='ddp'"
        for each in found
        if each.state and not isinstance(each, torch.optim.Adagrad)  # which DeepSpeed creates again
    ]
    if not config.get("zero_allow_untested_optimizer"):
        for each in found:
            device = each.param_groups[0]["params"][0].device
            lines += elementwise.problems_of([each], "elements", device)
    return lines


def _has_none(module: TrainingModule) -> bool:
    return type(module).configure_optimizers is TrainingModule.configure_optimizers


def one_bit_adam(config: Mapping[str, Any], module: TrainingModule) -> OneBitAdam:
    """Create the optimizer of a configuration with type ``OneBitAdam``.

    Raises:
        ConfigurationError: Unknown parameters.
    """
    given = dict(settings.section(config["optimizer"], "params"))
    for name in ("cuda_aware", "comm_backend_name"):  # options of DeepSpeed's own communication
        given.pop(name, None)
    try:
        return OneBitAdam([each for each in module.parameters() if each.requires_grad], **given)
    except TypeError as error:
        raise ConfigurationError(f"OneBitAdam in the DeepSpeed configuration: {error}") from None


def cpu_adam(optimizer: Optimizer) -> Optimizer:
    """Replace torch's Adam by DeepSpeed's Adam for CPUs, which is compiled on first use.

    Raises:
        ConfigurationError: The optimizer is not Adam or AdamW.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigurationError(
            f"strategy_options.cpu_adam replaces torch's Adam or AdamW, and "
            f"configure_optimizers gave {type(optimizer).__name__}"
        )
    for group in optimizer.param_groups:
        for name in ("amsgrad", "maximize"):
            if group[name]:
                raise ConfigurationError(f"strategy_options.cpu_adam does not support {name}")
    groups = [
        {name: group[name] for name in ("params", "lr", "betas", "eps", "weight_decay")}
        for group in optimizer.param_groups
    ]
    made: Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=type(optimizer) is torch.optim.AdamW)
    for group, old in zip(made.param_groups, optimizer.param_groups, strict=True):
        group.update({name: old[name] for name in old if name not in group})
    return made


class ConfiguredScheduler(LRScheduler):
    """A scheduler of DeepSpeed, adapted to torch's interface.

    Args:
        scheduler: A scheduler of DeepSpeed or torch.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.optimizer = scheduler.optimizer
        self._step_count = 2  # avoids a wrong warning about the order of steps

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates of the next step."""
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of DeepSpeed's scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float | Tensor]:
        """Learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]


def configured_scheduler(config: Mapping[str, Any], optimizer: Optimizer) -> list[SchedulerConfig]:
    """Create the scheduler that a configuration names; an empty list if there is none.

    Raises:
        ConfigurationError: Unknown parameters.
    """
    name = settings.kind(config, "scheduler")
    if name is None:
        return []
    from deepspeed.runtime import lr_schedules

    make = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    try:
        made = make(optimizer, **settings.section(config["scheduler"], "params"))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} in the DeepSpeed configuration: {error}") from None
    return [SchedulerConfig(ConfiguredScheduler(made), interval="step")]
