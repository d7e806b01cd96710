"""What a checkpoint contains of a fit, and how a fit resumes from it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..checkpoint import Checkpoint, is_sharded, read_all
from ..data import Feed, loader_state, randomness
from ..errors import CheckpointError, ConfigurationError
from ..launch.cluster import Layout
from ..logging import torchmetrics_state
from . import saved_types
from .parts import FitParts
from .saved_position import SavedPosition

_NOT_OF_THIS_MODEL = (
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
)


def state(fit: FitParts) -> dict[str, Any]:
    """State that is the same on every process."""
    outputs = fit.outputs
    return {
        **fit.strategy.state(fit.optimization),
        "schedules": [each.scheduler.state_dict() for each in fit.optimization.schedulers],
        "precision": fit.strategy.precision.state(),
        "position": asdict(SavedPosition.of(fit.position, fit.feed)),
        "epoch_values": outputs.epoch_values,
        "latest": dict(outputs.latest),
        "last_values": outputs.last_values,
        "logs": outputs.positions(),
        "gradients": _accumulated(fit, is_sharded),
        "callbacks": fit.calls.state(),
    }


def rank_local_state(fit: FitParts) -> dict[str, Tensor]:
    """Rank-local state: random states, and this process' part of unfinished sums."""
    parts = {
        "random": randomness.full_state(fit.strategy.devices),
        "log": fit.outputs.recorder.state(),
        "torchmetrics": torchmetrics_state.state(fit.module),
        "strategy": fit.strategy.rank_local_state(),
        "gradients": _accumulated(fit, lambda gradient: not is_sharded(gradient)),
        "loader": fit.feed.state(fit.position.batch, ends_epoch=fit.position.epoch_done),
    }
    return {
        f"{part}/{key}": value for part, values in parts.items() for key, value in values.items()
    }


def _accumulated(fit: FitParts, kind: Callable[[Tensor], bool]) -> dict[str, Tensor]:
    """Gradients of one kind that no optimizer step has used yet."""
    return fit.manual.gradients(kind) if fit.manual is not None else {}


def resume(fit: FitParts, checkpoint: Checkpoint, layout: Layout, same_run: bool) -> list[str]:
    """Resume from a checkpoint, as if training had not been interrupted.

    Args:
        fit: Parts whose state is loaded.
        checkpoint: The checkpoint.
        layout: Layout of this run; with another world size, random states are new.
        same_run: Whether the checkpoint is this run's; then it is saved again only after a step.

    Returns:
        notes on what could not be restored exactly.

    Raises:
        CheckpointError: It belongs to another model, or contains invalid values.
    """
    saved = checkpoint.stored_state()
    try:
        remarks = _load(fit, saved, checkpoint.step)
        _load_gradients(fit, saved, checkpoint, layout)
        if checkpoint.world_size == layout.world_size:
            own, shared = checkpoint.own(layout.rank), fit.strategy.random_rank
            random = own if shared == layout.rank else checkpoint.own(shared)
            _load_rank_local_state(fit, own, random)
            remarks += _load_loader(fit, own)
        else:
            remarks.append(
                f"saved by {checkpoint.world_size} processes, resumed on {layout.world_size}: "
                "random states (dropout) are new; the order of the data does not change"
            )
            if part(checkpoint.own(0), "loader"):
                remarks.append(loader_state.note_unused(fit.position.batch))
    except ConfigurationError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    except _NOT_OF_THIS_MODEL as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"{checkpoint.path}: does not match this model ({reason})") from None
    fit.position.saved_at = fit.position.global_step if same_run else -1
    return remarks


def _load(fit: FitParts, saved: dict[str, Any], step: int) -> list[str]:
    """Load the state that is the same on every process; return notes."""
    position, outputs = SavedPosition.read(saved["position"], step), fit.outputs
    configured, schedulers = fit.optimization.configured_rates(), fit.optimization.schedulers
    for index, (state, own) in enumerate(
        zip(saved["optimizers"], fit.optimization.optimizers, strict=False)
    ):
        if saved_types.is_of_torch(own):
            saved_types.check_optimizer(state, own, f"optimizers/{index}")
    fit.strategy.load_state(saved, fit.optimization)
    for each, of_scheduler in zip(schedulers, saved["schedules"], strict=True):
        if saved_types.is_of_torch(each.scheduler):
            saved_types.check(of_scheduler, each.scheduler.state_dict(), "schedules")
        each.scheduler.load_state_dict(read_all(of_scheduler))
    fit.strategy.precision.load_state(saved["precision"])
    remarks = fit.optimization.other_rates(configured) + _load_position(fit, position)
    logged = ["latest", "last_values", "logs"] + ["epoch_values"] * position.epoch_done
    values = {name: saved_types.numbers(saved[name], name) for name in logged}
    outputs.epoch_values = values.get("epoch_values", {})
    outputs.latest.update(values["latest"])
    if position.epoch_done or fit.position.is_end(fit.options):
        outputs.last_values = values["last_values"]
    outputs.log_positions = values["logs"]
    return remarks + fit.calls.load_state(saved.get("callbacks", {}))


def extra_steps(checkpoint: Checkpoint, feed: Feed) -> int:
    """By how much the steps of a checkpoint exceed those that a feed makes of its samples."""
    try:
        saved = SavedPosition.read(checkpoint.stored_state()["position"], checkpoint.step)
    except _NOT_OF_THIS_MODEL:
        return 0  # :func:`resume` says what is wrong
    if feed.steps is None:
        return 0
    steps = feed.steps if saved.epoch_done else saved.steps_of(feed)[0]
    return saved.global_step - saved.epoch * feed.steps - steps


def _load_position(fit: FitParts, saved: SavedPosition) -> list[str]:
    position, samples, remarks = fit.position, fit.feed.samples_per_step, list[str]()
    position.epoch, position.global_step = saved.epoch, saved.global_step
    position.epoch_done, position.validated_at = saved.epoch_done, saved.validated_at
    position.earlier_seconds = saved.seconds
    if samples and saved.samples_per_step and samples != saved.samples_per_step:
        remarks = [f"the effective batch size is {samples}; it was {saved.samples_per_step}"]
    if position.epoch_done:
        return remarks
    steps, rest = saved.steps_of(fit.feed)
    position.batch = steps * fit.feed.accumulate
    if rest:
        remarks = [f"{each}: {rest} samples of this epoch are read again" for each in remarks]
    return remarks


def _load_gradients(
    fit: FitParts, saved: Mapping[str, Any], checkpoint: Checkpoint, layout: Layout
) -> None:
    """Load accumulated gradients: each rank's own, or the mean of all ranks'."""
    if fit.manual is None:
        return
    sharded = saved.get("gradients", {})
    ranks = range(checkpoint.world_size)
    is_as_saved = checkpoint.world_size == layout.world_size
    if is_as_saved and (sharded or not fit.strategy.shards_parameters):
        ranks = range(layout.rank, layout.rank + 1)
    own = [part(checkpoint.own(rank), "gradients") for rank in ranks]
    fit.manual.load_gradients(sharded, own)


def _load_rank_local_state(
    fit: FitParts, own: Mapping[str, Tensor], random: Mapping[str, Tensor]
) -> None:
    fit.strategy.load_rank_local_state(part(own, "strategy"))
    fit.outputs.recorder.load_state(part(own, "log"))
    torchmetrics_state.load(fit.module, part(own, "torchmetrics"))
    randomness.set_full_state(part(random, "random"), fit.strategy.devices)


def _load_loader(fit: FitParts, own: Mapping[str, Tensor]) -> list[str]:
    state = part(own, "loader")
    return fit.feed.load_state(state, fit.position.batch) if state else []


def part(own: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """One part of what :func:`rank_local_state` returned, such as ``"strategy"``."""
    start = f"{name}/"
    return {key.removeprefix(start): each for key, each in own.items() if key.startswith(start)}
