"""The position of training, its length, and the factor of learning rates at a step."""

import time
from dataclasses import dataclass

from ..errors import ConfigurationError
from ..options import Options


@dataclass
class Position:
    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    epoch_done: bool = False  # all batches are done, but not yet the work at the end of the epoch
    saved_at: int = -1  # the step after which training was last saved
    validated_at: int = -1
    is_stopped: bool = False  # all ranks have agreed to stop
    earlier_seconds: float = 0.0  # of training before the checkpoint that was resumed
    started: float | None = None  # this attempt, on the monotonic clock

    @property
    def seconds(self) -> float:
        """Duration of training so far, including validation and that of earlier attempts."""
        current = 0.0 if self.started is None else time.monotonic() - self.started
        return self.earlier_seconds + current

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step, at whose end the position is already the next one's start."""
        return self.epoch if self.batch else max(0, self.epoch - 1)

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
        advice = "the loader's batch size is unknown; scale the rate in configure_optimizers"
        raise ConfigurationError(f"learning_rate_scaling={rule!r}: {advice}")
    ratio = batch_size / reference
    return ratio if rule == "linear" else ratio**0.5


def warmed_up_rate(target: float, warmup_steps: int, step: int) -> float:
    """The factor at a step, counted from 0: it rises or falls from 1 in a straight line."""
    return target if step >= warmup_steps else 1.0 + (target - 1.0) * (step + 1) / warmup_steps
