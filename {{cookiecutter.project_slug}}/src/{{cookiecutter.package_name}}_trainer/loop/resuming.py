"""How a fit resumes from a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..checkpoint import OF_ANOTHER_MODEL, Checkpoint, read_all
from ..checkpoint.state_file import MOST_STEPS, check_count, from_tensors
from ..data import Feed, randomness
from ..data.feed import note_unused
from ..errors import CheckpointError, ConfigurationError, shown
from ..launch.cluster import Layout
from ..logging import metrics, torchmetrics_state
from .parts import EVAL_MODE, FROZEN, TOTAL_STEPS, FitParts
from .saving import OF_MODULE, share

# What schedulers set in parameter groups.
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "betas", "momentum")


def resume(fit: FitParts, checkpoint: Checkpoint, layout: Layout, same_run: bool) -> list[str]:
    """Resume from a checkpoint; return notes on what could not be restored exactly.

    With another world size in ``layout``, random states are new. ``same_run``: the checkpoint is
    this run's, which is saved again only after a step.
    """
    saved = checkpoint.stored_state()
    try:
        remarks = _load(fit, saved, checkpoint.step)
        _load_gradients(fit, saved, checkpoint, layout)
        remarks += _load_sums(fit, checkpoint, layout)
        if checkpoint.world_size == layout.world_size:
            local, data = checkpoint.rank_local_state(layout.rank), fit.strategy.data
            shared = data.random_rank
            random = local if shared == layout.rank else checkpoint.rank_local_state(shared)
            fit.strategy.rank_local.load(section(local, "strategy"))
            buffers = dict(fit.module.named_buffers())
            for name, value in section(local, "buffers").items():
                buffers[name].detach().copy_(value)
            randomness.set_full_state(section(random, "random"), data.devices)
            if of_module := section(local, "module"):
                fit.module.load_rank_state(from_tensors(of_module, OF_MODULE))
            if loader := section(local, "loader"):
                remarks += fit.feed.load_state(loader, fit.position.batch)
        else:
            sizes = f"saved by {checkpoint.world_size} processes, resumed on {layout.world_size}"
            effect = "random states (dropout) are new; the order of the data does not change"
            remarks.append(f"{sizes}: {effect}")
            if section(checkpoint.rank_local_state(0), "loader"):
                remarks.append(note_unused(fit.position.batch))
            if section(checkpoint.rank_local_state(0), "module"):
                remarks.append("rank_state of the module is not restored: it is of other ranks")
    except ConfigurationError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    except OF_ANOTHER_MODEL as error:
        raise checkpoint.mismatch(error) from None
    fit.position.saved_at = fit.position.global_step if same_run else -1
    return remarks


def _load_sums(fit: FitParts, checkpoint: Checkpoint, layout: Layout) -> list[str]:
    """Load what ranks have logged in the epoch so far; of another layout, merged on replica 0."""
    here, recorder, states = share(fit), fit.outputs.recorder, list[dict[str, Tensor]]()
    is_same = checkpoint.world_size == layout.world_size
    local = checkpoint.rank_local_state(layout.rank) if is_same else {}
    if local and torch.equal(section(local, "share")["of"], here):
        states = [local]
        recorder.load_state(section(local, "log"))
    elif fit.strategy.data.index == 0 and here[2]:
        saved = [checkpoint.rank_local_state(rank) for rank in range(checkpoint.world_size)]
        shares = [(section(state, "share")["of"], state) for state in saved]
        # Ranks of one replica have logged the same.
        states = [*{int(of[0]): state for of, state in shares if of[2]}.values()]
        recorder.load_state(_merged([section(state, "log") for state in states]))
    else:
        recorder.may_lack_names = True  # what has been logged in this epoch is replica 0's
    return torchmetrics_state.load(fit.module, [section(x, "torchmetrics") for x in states])


def _merged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of several ranks as those of one; what is of single ranks is left out."""
    merged: dict[str, Tensor] = {}
    for key, value in (item for state in states for item in state.items()):
        how, synced, _ = key.removeprefix(metrics.STEPS).split(":", 2)
        if synced == "1":
            merge = {"min": torch.minimum, "max": torch.maximum}.get(how, torch.add)
            merged[key] = merge(merged[key], value) if key in merged else value
    return merged


def _load(fit: FitParts, saved: dict[str, Any], step: int) -> list[str]:
    """Load the state that is the same on every process; return notes."""
    outputs = fit.outputs
    position = _checked(saved["position"], step)
    remarks = _load_optimization(fit, saved)
    fit.strategy.precision.load_state(saved["precision"])
    remarks += _load_position(fit, position)
    outputs.latest.update(_numbers(saved["latest"]))
    for kind, names in saved["fresh"].items():
        outputs.fresh[kind].update(outputs.latest.keys() & names)
    if fit.position.epoch_done:
        outputs.epoch_values = _numbers(saved["epoch_values"])
    if fit.position.epoch_done or fit.position.is_end(fit.options):
        outputs.last_values = _numbers(saved["last_values"])
    outputs.log_positions = {name: int(position) for name, position in saved["logs"].items()}
    return remarks + fit.calls.load_state(saved["callbacks"])


def freeze_as_at_start(module: nn.Module, resumed: Checkpoint) -> None:
    """Freeze what the run of a checkpoint began with: the set-up of a strategy may depend on it."""
    was = resumed.stored_state().get("configured")
    if isinstance(was, dict) and isinstance(names := was.get(FROZEN), list):
        _freeze(module, names)


def _freeze(module: nn.Module, names: list[str]) -> None:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in names):
            parameter.requires_grad_(name not in names)


def _load_optimization(fit: FitParts, saved: Mapping[str, Any]) -> list[str]:
    """Load model, optimizers, schedulers and what is frozen; return a line for each difference.

    Compared is what the code gave at the start; what schedules and hooks have changed is restored.
    """
    optimization, code, was = fit.optimization, fit.configured, saved["configured"]
    differ = [name for name in code if name in was and was[name] != code[name]]
    takes_code = fit.options.resume_options == "code"
    lines = [_line(name, was[name], code[name], takes_code) for name in differ]
    taken = set(differ) if takes_code else set()
    # Then the schedule is the code's from its beginning.
    is_new = any("scheduler " in option or option.startswith("lr of") for option in taken)
    states, schedulers = saved["schedules"], [s.scheduler for s in optimization.schedulers]
    if len(states) != len(schedulers):
        raise ValueError(f"it has {len(states)} schedulers, and the code {len(schedulers)}")
    is_replayed = [is_new and not isinstance(s, ReduceLROnPlateau) for s in schedulers]
    for scheduler, state, replays in zip(schedulers, states, is_replayed, strict=True):
        if replays:
            _replay(scheduler, state)
    options = [[dict(group) for group in opt.param_groups] for opt in optimization.optimizers]
    fit.strategy.load_state(saved, optimization)
    for index, (scheduler, state) in enumerate(zip(schedulers, states, strict=True)):
        if not is_replayed[index]:
            kept = {key for key in state if f"{key} of scheduler {index}" not in taken}
            scheduler.load_state_dict(read_all({key: state[key] for key in kept}))
    for index, (optimizer, groups) in enumerate(zip(optimization.optimizers, options, strict=True)):
        keys = {key for key in groups[0] if f"{key} of optimizer {index}" in taken}
        keys |= {key for key in groups[0] if is_new and key in _SCHEDULED}
        # Groups that a hook had added come after those of the code.
        for group, own_group in zip(optimizer.param_groups, groups, strict=False):
            group.update({key: own_group[key] for key in keys})
    optimization.configured_rates()  # are numbers
    if FROZEN not in taken:
        _freeze(fit.module, saved["frozen"])
    for name, layer in fit.module.named_modules() if EVAL_MODE not in taken else ():
        layer.training = name not in saved["eval_mode"]
    code |= {name: was[name] for name in differ if name not in taken and name != TOTAL_STEPS}
    return lines


def _line(name: str, was: Any, code: Any, takes_code: bool) -> str:
    if name in (FROZEN, EVAL_MODE):
        was, code = ([item for item in a if item not in b] for a, b in ((was, code), (code, was)))
    if name == TOTAL_STEPS:
        used = "a schedule that reads trainer.total_steps is another one now"
    elif takes_code or (" of " not in name and name not in (FROZEN, EVAL_MODE)):
        used = "the code's is used"
    else:
        used = "the checkpoint's is used; resume_options='code' takes the code's"
    return f"{name}: {shown(was)} in the checkpoint, {shown(code)} in the code: {used}"


def _numbers(saved: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in saved.items()}


def extra_steps(checkpoint: Checkpoint, feed: Feed) -> int:
    """By how much the steps of a checkpoint exceed those that a feed makes of its samples."""
    try:
        saved = _checked(checkpoint.stored_state()["position"], checkpoint.step)
    except OF_ANOTHER_MODEL:
        return 0  # :func:`resume` says what is wrong
    if feed.steps is None:
        return 0
    steps = feed.steps if saved["epoch_done"] else _steps_of(saved, feed)[0]
    return int(saved["global_step"] - saved["epoch"] * feed.steps - steps)


def _checked(saved: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """Check the position of a checkpoint; KeyError, TypeError or ValueError if it is invalid."""
    least = {"epoch": 0, "step_in_epoch": 0, "global_step": step, "validated_at": -1}
    if saved["samples_per_step"] is not None:
        least["samples_per_step"] = 1
    for name, smallest in least.items():
        is_step = name in ("global_step", "validated_at")
        check_count(name, saved[name], smallest, step if is_step else MOST_STEPS)
    return saved


def _steps_of(saved: Mapping[str, Any], feed: Feed) -> tuple[int, int]:
    """Steps of a feed for the samples of the epoch so far, and samples that remain."""
    steps: int = saved["step_in_epoch"]
    if not (feed.samples_per_step and saved["samples_per_step"]):
        return steps, 0
    return divmod(steps * int(saved["samples_per_step"]), feed.samples_per_step)


def _load_position(fit: FitParts, saved: Mapping[str, Any]) -> list[str]:
    position, samples, remarks = fit.position, fit.feed.samples_per_step, list[str]()
    for name in ("epoch", "global_step", "epoch_done", "validated_at"):
        setattr(position, name, saved[name])
    position.earlier_seconds = float(saved["seconds"])
    earlier = saved["samples_per_step"]
    if samples and earlier and samples != earlier:
        remarks = [f"the effective batch size is {samples}; it was {earlier}"]
    if position.epoch_done:
        return remarks
    steps, rest = _steps_of(saved, fit.feed)
    position.batch = steps * fit.feed.accumulate
    if rest:
        remarks = [f"{remark}: {rest} samples of this epoch are read again" for remark in remarks]
    return remarks


def _load_gradients(
    fit: FitParts, saved: Mapping[str, Any], checkpoint: Checkpoint, layout: Layout
) -> None:
    """Load accumulated gradients: each rank's own, or the mean of all ranks'."""
    if fit.manual is None:
        return
    sharded, ranks = saved.get("gradients", {}), range(checkpoint.world_size)
    is_as_saved = checkpoint.world_size == layout.world_size
    if is_as_saved and (sharded or not fit.strategy.limits.shards_parameters):
        ranks = range(layout.rank, layout.rank + 1)
    per_rank = [section(checkpoint.rank_local_state(rank), "gradients") for rank in ranks]
    fit.manual.load_gradients(sharded, per_rank)


def section(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """One part of what :func:`.saving.rank_local_state` returned, such as ``"strategy"``."""
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}


def _replay(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Step a new scheduler as often as the one of a saved state was."""
    while "last_epoch" not in saved:  # of a ChainedScheduler
        saved = saved["_schedulers"][0]
    for _ in range(saved["last_epoch"]):
        scheduler.step()
