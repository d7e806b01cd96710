"""Where training stands, and which of its steps are logged."""

from dataclasses import dataclass

from ..arguments.options import Options
from ..data.feed import Feed, MicroBatch


@dataclass
class Position:
    """Where training stands; the loop updates it."""

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
    # With accumulation, the step's earlier micro-batches were not recorded.
    return batch.ends_epoch and feed.accumulate == 1
