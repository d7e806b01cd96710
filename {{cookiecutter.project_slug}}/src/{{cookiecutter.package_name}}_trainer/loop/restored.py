"""What the code configures and a checkpoint restores: compared, and taken from one of the two.

Compared is what the code gave at the start: what a schedule or a hook has changed since is no
difference, and is restored.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..checkpoint import Checkpoint, read_all
from ..errors import shown
from ..strategies.optimizers import replay
from .parts import FROZEN, TOTAL_STEPS, FitParts

# What schedulers set in parameter groups.
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "betas", "momentum")


def freeze_as_at_start(module: nn.Module, resumed: Checkpoint) -> None:
    """Freeze what the run of a checkpoint began with: the set-up of a strategy may depend on it."""
    was = resumed.stored_state().get("configured")
    if isinstance(was, dict) and isinstance(names := was.get(FROZEN), list):
        _freeze(module, names)


def _freeze(module: nn.Module, names: list[str]) -> None:
    for name, each in module.named_parameters():
        if each.requires_grad == (name in names):
            each.requires_grad_(name not in names)


def load(fit: FitParts, saved: Mapping[str, Any]) -> list[str]:
    """Load model, optimizers, schedulers and what is frozen; return a line for each difference."""
    optimization, code, was = fit.optimization, fit.configured, saved.get("configured", {})
    differ = [name for name in code if name in was and was[name] != code[name]]
    takes_code = fit.options.resume_options == "code"
    lines = [_line(name, was[name], code[name], takes_code) for name in differ]
    taken = set(differ) if takes_code else set()
    # Then the schedule is the code's from its beginning.
    is_new = any("scheduler " in each or each.startswith("lr of") for each in taken)
    states, schedulers = saved["schedules"], [each.scheduler for each in optimization.schedulers]
    if len(states) != len(schedulers):
        raise ValueError(f"it has {len(states)} schedulers, and the code {len(schedulers)}")
    is_replayed = [is_new and not isinstance(each, ReduceLROnPlateau) for each in schedulers]
    for scheduler, state, replays in zip(schedulers, states, is_replayed, strict=True):
        if replays:
            replay(scheduler, state)
    options = [[dict(group) for group in each.param_groups] for each in optimization.optimizers]
    fit.strategy.load_state(saved, optimization)
    for index, (scheduler, state) in enumerate(zip(schedulers, states, strict=True)):
        if not is_replayed[index]:
            own = {key for key in state if f"{key} of scheduler {index}" not in taken}
            scheduler.load_state_dict(read_all({key: state[key] for key in own}))
    for index, (optimizer, groups) in enumerate(zip(optimization.optimizers, options, strict=True)):
        keys = {key for key in groups[0] if f"{key} of optimizer {index}" in taken}
        keys |= {key for key in groups[0] if is_new and key in _SCHEDULED}
        for group, own_group in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: own_group[key] for key in keys})
    optimization.configured_rates()  # are numbers
    if "frozen" in saved and FROZEN not in taken:
        _freeze(fit.module, saved["frozen"])
    code |= {name: was[name] for name in differ if name not in taken and name != TOTAL_STEPS}
    return lines


def _line(name: str, was: Any, code: Any, takes_code: bool) -> str:
    if name == FROZEN:
        was, code = ([each for each in a if each not in b] for a, b in ((was, code), (code, was)))
    if name == TOTAL_STEPS:
        used = "a schedule that reads trainer.total_steps is another one now"
    elif takes_code or (" of " not in name and name != FROZEN):
        used = "the code's is used"
    else:
        used = "the checkpoint's is used; resume_options='code' takes the code's"
    return f"{name}: {shown(was)} in the checkpoint, {shown(code)} in the code: {used}"
