"""What is known of a batch while its step runs."""

from typing import NamedTuple


class BatchContext(NamedTuple):
    """The facts of a batch on which its step, and what that logs, depend.

    The loop makes one for each batch, and nobody changes it. Outside a loop the defaults hold.
    """

    samples: int = 1
    """Of this process that count; 0 if the batch only keeps it in step with the others."""
    weight: float = 1.0
    """Factor of the mean loss over the samples."""
    ends_step: bool = True
    """Whether the optimizers step after it, and gradients are synchronized for that."""
    ends_epoch: bool = False
    is_recorded: bool = False
    """Whether values of its single step are written."""
    is_training: bool = True
    rate_factor: float = 1.0
    """What learning rates are multiplied by in its step."""
