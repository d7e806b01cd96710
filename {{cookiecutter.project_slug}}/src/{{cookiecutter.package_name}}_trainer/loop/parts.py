"""The parts of a fit, its position and its length, which the loop and its checkpoints share."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callbacks.callback import HookCalls
from ..checkpoint.left_out import LeftOut
from ..data import Feed, MicroBatch, moving
from ..errors import ConfigurationError, UserError, shown
from ..launch import collectives
from ..launch.hangs import timer
from ..logging.outputs import Outputs
from ..logging.progress import Speed
from ..module import TrainingModule
from ..module.hooks import is_overridden
from ..options import Options
from ..strategies import Strategy
from ..strategies.optimizers import Optimization

if TYPE_CHECKING:
    from .compilation import Compiled
    from .manual_optimization import ManualOptimization


FROZEN, TOTAL_STEPS = "frozen parameters", "total_steps"
"""Names in ``FitParts.configured``, beside those of ``strategies.optimizers.described``."""


def frozen(module: TrainingModule) -> list[str]:
    """Names of the parameters that are not trained."""
    return [name for name, each in module.named_parameters() if not each.requires_grad]


@dataclass
class Position:
    """The current position of training, updated by the loop.

    ``epoch_done``: all batches of the epoch are done, but not yet the work at its end; ``saved_at``
    and ``validated_at``: the steps after which training was last saved and validated;
    ``is_stopped``: all ranks have agreed to stop; ``earlier_seconds``: duration of training before
    the checkpoint that was resumed; ``started``: of this attempt, on the monotonic clock.
    """

    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    epoch_done: bool = False
    saved_at: int = -1
    validated_at: int = -1
    is_stopped: bool = False
    earlier_seconds: float = 0.0
    started: float | None = None

    @property
    def seconds(self) -> float:
        """Duration of training so far, including validation and that of earlier attempts."""
        own = 0.0 if self.started is None else time.monotonic() - self.started
        return self.earlier_seconds + own

    def is_out_of_time(self, options: Options) -> bool:
        """Whether training has taken ``max_time``, on this rank's clock."""
        return options.max_seconds is not None and self.seconds >= options.max_seconds

    def is_due(self, every_n_steps: int | None, every_n_epochs: int) -> bool:
        """Whether what is done every N steps and every N epochs is due after an epoch."""
        after_step = every_n_steps is not None and self.global_step % every_n_steps == 0
        return after_step or (self.epoch + 1) % every_n_epochs == 0

    def is_end(self, options: Options) -> bool:
        """Whether training has made all epochs or steps of the options, or was stopped."""
        epochs, steps = options.max_epochs, options.max_steps
        return (
            self.is_stopped
            or (epochs is not None and self.epoch + self.epoch_done >= epochs)
            or (steps is not None and self.global_step >= steps)
        )


@dataclass(frozen=True)
class FitParts:
    """The parts of a fit, after the strategy's ``setup``.

    ``optimization``: the optimizers that ``setup`` returned; ``manual``: only for a module with
    manual optimization; ``feed``: training batches; ``outputs``: where values are logged;
    ``calls``: hooks of callbacks and of the module; ``configured``: what a resume compares with a
    checkpoint, see :mod:`.resuming`; ``compiled``: what is compiled of the module; ``left_out``:
    what checkpoints leave out.
    """

    options: Options
    module: TrainingModule
    strategy: Strategy
    optimization: Optimization
    manual: "ManualOptimization | None"
    feed: Feed
    outputs: Outputs
    position: Position
    calls: HookCalls
    configured: dict[str, Any]
    compiled: "Compiled | None"
    left_out: LeftOut | None


def read(
    strategy: Strategy, feed: Feed, epoch: int, start: int, speed: Speed | None = None
) -> Iterator[MicroBatch]:
    """Read the batches of an epoch on a strategy's devices; ``speed`` measures the waits."""
    devices, dtype = strategy.data.devices, strategy.precision.parameter_dtype
    batches, clock = moving.ahead(feed.epoch(epoch, start), devices, dtype), time.perf_counter
    started = clock()
    if timer.is_armed:
        timer.begin("evaluation" if speed is None else "training")
    try:
        for batch in batches:
            if speed is not None:
                speed.waited += clock() - started
                if speed.count_tokens is not None:
                    speed.tokens += speed.count_tokens(batch)
            yield batch
            if timer.is_armed:
                timer.note_batch()
            started = clock()
    finally:
        if timer.is_armed:
            timer.pause()


def gathered(outputs: Sequence[Any], device: torch.device) -> Any:
    """What hooks get of the outputs of a micro-batch, without their gradients.

    If the strategy divides the batch, there are several, which are gathered on ``device`` as ``dp``
    does; ``None`` without any.
    """
    parts = [moving.mapped(each, _detached) for each in outputs]
    if not parts:
        return None
    whole = parts[0]
    if len(parts) > 1:
        from ..strategies.replicated.dp import gather

        whole = gather(parts, device)
    return {"loss": whole} if isinstance(whole, Tensor) else whole


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def speed_of(fit: FitParts) -> Speed:
    """Create what measures the speed of a fit; only the main rank counts tokens."""
    module, samples, peak = fit.module, fit.feed.samples_per_step, fit.options.peak_flops

    def count_tokens(batch: MicroBatch) -> int:
        count = module.count_tokens(batch.data) if batch.samples else 0
        if not isinstance(count, int):  # a tensor would make the host wait for the device
            raise UserError(
                f"{type(module).__name__}.count_tokens returned {shown(count)}: return an int, for "
                "example batch.numel()"
            )
        return count * fit.strategy.data.replicas

    peak_samples = None
    counts = collectives.rank() == 0 and is_overridden(module, TrainingModule, "count_tokens")
    if peak is not None and module.flops_per_sample:
        if samples is None:
            raise UserError("peak_flops: the loader has no batch_size; leave peak_flops out")
        devices = collectives.world_size() * len(fit.strategy.data.devices)
        peak_samples = peak * devices / module.flops_per_sample
    return Speed(samples, count_tokens if counts else None, peak_samples)


def total_steps(
    steps_per_epoch: int | None, max_epochs: int | None, max_steps: int | None, extra: int = 0
) -> int | None:
    """Optimizer steps of a whole run; ``None`` if unknown.

    ``extra``: by how much the steps that were made before a resume exceed those of this run.
    """
    bounds = [] if max_steps is None else [max_steps]
    if max_epochs is not None and steps_per_epoch is not None:
        bounds.append(max_epochs * steps_per_epoch + extra)
    return min(bounds, default=None)


def scaled_rate(options: Options, batch_size: int | None, device_batch_size: int | None) -> float:
    """The factor of the learning rates after the warm-up; batch sizes are ``None`` if unknown.

    It is applied on top of optimizers and schedulers, which do not see it.
    ``learning_rate_scaling`` is ``"none"``; ``"linear"``: proportional to the batch size (Goyal et
    al. 2017, https://arxiv.org/abs/1706.02677); or ``"sqrt"``: to its square root (Krizhevsky 2014,
    https://arxiv.org/abs/1404.5997).
    """
    rule = options.learning_rate_scaling
    if rule == "none":
        return 1.0
    reference = options.reference_batch_size or device_batch_size
    if batch_size is None or reference is None:
        raise ConfigurationError(
            f"learning_rate_scaling={rule!r}: the loader's batch size is unknown; scale the rate "
            "in configure_optimizers"
        )
    ratio = batch_size / reference
    return ratio if rule == "linear" else ratio**0.5


def warmed_up_rate(target: float, warmup_steps: int, step: int) -> float:
    """The factor at a step, counted from 0: it rises or falls from 1 in a straight line."""
    if step >= warmup_steps:
        return target
    return 1.0 + (target - 1.0) * (step + 1) / warmup_steps
