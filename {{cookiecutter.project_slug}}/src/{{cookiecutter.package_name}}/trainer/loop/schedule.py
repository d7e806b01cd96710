"""Where training stands, and when things happen in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.state_file import MOST_STEPS, check_count
from ..data.feed import Feed, MicroBatch


@dataclass
class Position:
    """Where training stands."""

    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    is_last_batch: bool = False
    epoch_done: bool = False
    """Whether all batches of the epoch are trained on; what an epoch ends with is not done yet."""


@dataclass(frozen=True)
class SavedPosition:
    """Where training stood, from a checkpoint. Steps, not batches: those depend on the layout."""

    epoch: int
    step_in_epoch: int
    samples_per_step: int | None
    global_step: int
    validated_at: int
    epoch_done: bool

    @classmethod
    def of(cls, position: Position, feed: Feed, validated_at: int) -> "SavedPosition":
        """Where training stands now.

        Args:
            position: of this layout.
            feed: of this layout.
            validated_at: the step that was last validated.
        """
        return cls(
            epoch=position.epoch,
            step_in_epoch=position.batch // feed.accumulate,
            samples_per_step=feed.samples_per_step,
            global_step=position.global_step,
            validated_at=validated_at,
            epoch_done=position.epoch_done,
        )

    @classmethod
    def read(cls, saved: Mapping[str, Any], step: int) -> "SavedPosition":
        """Check what a checkpoint of a step holds.

        Raises:
            KeyError, TypeError, ValueError: it cannot be.
        """
        samples = saved["samples_per_step"]
        # Not there in older ones: an epoch's end was saved when it had been validated.
        if type(epoch_done := saved.get("epoch_done", False)) is not bool:
            raise ValueError(f"epoch_done is {epoch_done!r}, not true or false")
        return cls(
            epoch=check_count("epoch", saved["epoch"], 0, MOST_STEPS),
            step_in_epoch=check_count("step_in_epoch", saved["step_in_epoch"], 0, MOST_STEPS),
            samples_per_step=samples and check_count("samples_per_step", samples, 1, MOST_STEPS),
            global_step=check_count("global_step", saved["global_step"], step, step),
            validated_at=check_count("validated_at", saved["validated_at"], -1, step),
            epoch_done=epoch_done,
        )


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
        stop_on_nonfinite_loss: end with an error after a step whose loss is not finite.
    """

    max_epochs: int | None
    max_steps: int | None
    log_every_n_steps: int
    check_val_every_n_epoch: int
    val_every_n_steps: int | None
    checkpoint_every_n_steps: int | None
    stop_on_nonfinite_loss: bool = True

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
