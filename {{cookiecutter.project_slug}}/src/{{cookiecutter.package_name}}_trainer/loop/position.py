"""The position of training, and which of its steps are logged."""

import time
from dataclasses import dataclass

from ..data import MicroBatch
from ..options import Options


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

    def is_end(self, options: Options) -> bool:
        """Whether training has made all epochs or steps of the options, or was stopped."""
        if self.is_stopped:
            return True
        epochs, steps = options.max_epochs, options.max_steps
        return (epochs is not None and self.epoch + self.epoch_done >= epochs) or (
            steps is not None and self.global_step >= steps
        )


def is_logged(options: Options, step: int) -> bool:
    """Whether to log a step, counted from 1, even if training does not end with it."""
    return step == 1 or step % options.log_every_n_steps == 0


def is_planned_end(options: Options, position: Position, batch: MicroBatch) -> bool:
    """Whether ``max_steps`` or ``max_epochs`` ends training with the step of this batch."""
    epochs, steps = options.max_epochs, options.max_steps
    if steps is not None and position.global_step + 1 >= steps:
        return True
    return batch.ends_epoch and epochs is not None and position.epoch + 1 >= epochs
