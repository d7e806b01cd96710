"""Where training stands, and when things happen in it."""

from dataclasses import dataclass

from .feed import Feed, MicroBatch


@dataclass
class Position:
    """Where training stands."""

    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    is_last_batch: bool = False


@dataclass(frozen=True)
class Schedule:
    """When things happen.

    Args:
        max_epochs: epochs to train; ``None``: until ``max_steps``.
        max_steps: optimizer steps to train; ``None``: until ``max_epochs``.
        log_every_n_steps: log the values of every N-th step, of the first and of the last.
        check_val_every_n_epoch: run validation every N epochs.
        val_every_n_steps: run validation every N optimizer steps, too.
        checkpoint_every_n_steps: save every N optimizer steps, besides after each epoch.
    """

    max_epochs: int | None
    max_steps: int | None
    log_every_n_steps: int
    check_val_every_n_epoch: int
    val_every_n_steps: int | None
    checkpoint_every_n_steps: int | None

    def logs(self, step: int) -> bool:
        """Whether a step, counted from 1, is logged wherever training ends."""
        return step == 1 or step % self.log_every_n_steps == 0

    @property
    def ends(self) -> tuple[int | None, int | None]:
        """``max_epochs`` and ``max_steps``: whichever comes first ends training."""
        return self.max_epochs, self.max_steps


@dataclass(frozen=True)
class Clip:
    """How gradients are clipped: ``"norm"`` or ``"value"``."""

    value: float
    algorithm: str


def is_last_step(schedule: Schedule, position: Position, batch: MicroBatch, feed: Feed) -> bool:
    """Whether training ends with the step of a batch, as far as that can be known."""
    epochs, steps = schedule.ends
    if steps is not None and position.global_step + 1 >= steps:
        return True
    if epochs is None or position.epoch + 1 < epochs:
        return False
    if feed.has_plan and feed.steps is not None:
        return batch.number // feed.accumulate + 1 >= feed.steps
    # With accumulation, the step's earlier batches have gone by without being recorded.
    return batch.ends_epoch and feed.accumulate == 1
