"""The position of training in a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.state_file import MOST_STEPS, check_count
from ..data.feed import Feed
from .position import Position


@dataclass(frozen=True)
class SavedPosition:
    """A position in a checkpoint: in steps, not batches, because these depend on the layout.

    ``seconds``: duration of training so far.
    """

    epoch: int
    step_in_epoch: int
    samples_per_step: int | None
    global_step: int
    validated_at: int
    epoch_done: bool
    seconds: float

    @classmethod
    def of(cls, position: Position, feed: Feed) -> "SavedPosition":
        """Convert the current position.

        Args:
            position: Position in this layout.
            feed: Training batches of this layout.
        """
        return cls(
            epoch=position.epoch,
            step_in_epoch=position.batch // feed.accumulate,
            samples_per_step=feed.samples_per_step,
            global_step=position.global_step,
            validated_at=position.validated_at,
            epoch_done=position.epoch_done,
            seconds=position.seconds,
        )

    def steps_of(self, feed: Feed) -> tuple[int, int]:
        """Steps of a feed for the samples of the epoch so far, and samples that remain."""
        if not (feed.samples_per_step and self.samples_per_step):
            return self.step_in_epoch, 0
        return divmod(self.step_in_epoch * self.samples_per_step, feed.samples_per_step)

    @classmethod
    def read(cls, saved: Mapping[str, Any], step: int) -> "SavedPosition":
        """Read and check the position of a checkpoint.

        Raises:
            KeyError, TypeError, ValueError: It is invalid.
        """
        samples = saved["samples_per_step"]
        # Missing in older checkpoints, which were saved at the end of an epoch after validation.
        if type(epoch_done := saved.get("epoch_done", False)) is not bool:
            raise ValueError(f"epoch_done is {epoch_done!r}, not true or false")
        seconds = saved.get("seconds", 0.0)
        if type(seconds) is not float or not 0 <= seconds < math.inf:
            raise ValueError(f"seconds is {seconds!r}, not a duration")
        return cls(
            epoch=check_count("epoch", saved["epoch"], 0, MOST_STEPS),
            step_in_epoch=check_count("step_in_epoch", saved["step_in_epoch"], 0, MOST_STEPS),
            samples_per_step=samples and check_count("samples_per_step", samples, 1, MOST_STEPS),
            global_step=check_count("global_step", saved["global_step"], step, step),
            validated_at=check_count("validated_at", saved["validated_at"], -1, step),
            epoch_done=epoch_done,
            seconds=seconds,
        )
