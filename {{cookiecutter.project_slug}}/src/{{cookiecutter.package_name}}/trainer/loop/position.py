"""Where training stands, and which of its steps are logged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..arguments.options import Options
from ..checkpoint.state_file import MOST_STEPS, check_count
from ..data.feed import Feed, MicroBatch


@dataclass
class Position:
    """Where training stands; the loop keeps it up to date."""

    epoch: int = 0
    batch: int = 0
    global_step: int = 0
    epoch_done: bool = False
    """Whether all batches of the epoch are trained on; what an epoch ends with is not done yet."""
    saved_at: int = -1
    """The step after which training was last saved."""
    validated_at: int = -1
    """The step after which the module was last validated."""

    def is_end(self, options: Options) -> bool:
        """Whether all epochs or steps that options ask for are made."""
        epochs, steps = options.max_epochs, options.max_steps
        return (epochs is not None and self.epoch + self.epoch_done >= epochs) or (
            steps is not None and self.global_step >= steps
        )


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
    def of(cls, position: Position, feed: Feed) -> "SavedPosition":
        """Where training stands now, by the feed of this layout."""
        return cls(
            epoch=position.epoch,
            step_in_epoch=position.batch // feed.accumulate,
            samples_per_step=feed.samples_per_step,
            global_step=position.global_step,
            validated_at=position.validated_at,
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


def is_logged(options: Options, step: int) -> bool:
    """Whether a step, counted from 1, is logged wherever training ends."""
    return step == 1 or step % options.log_every_n_steps == 0


def is_last_step(options: Options, position: Position, batch: MicroBatch, feed: Feed) -> bool:
    """Whether training ends with the step of a batch, as far as that can be known."""
    epochs, steps = options.max_epochs, options.max_steps
    if steps is not None and position.global_step + 1 >= steps:
        return True
    if epochs is None or position.epoch + 1 < epochs:
        return False
    if feed.has_plan and feed.steps is not None:
        return batch.number // feed.accumulate + 1 >= feed.steps
    # With accumulation, the step's earlier batches have gone by without being recorded.
    return batch.ends_epoch and feed.accumulate == 1
