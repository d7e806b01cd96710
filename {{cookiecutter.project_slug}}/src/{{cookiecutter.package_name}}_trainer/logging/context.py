"""The context of a batch while its step runs."""

from typing import Literal, NamedTuple

Level = Literal["step", "epoch", "none"]


class BatchContext(NamedTuple):
    """Properties of a batch on which its step and logged values depend.

    The loop creates one for each batch, and for hooks between them, and nothing changes it. Outside
    a loop the defaults apply.
    """

    samples: int = 1
    """This rank's samples that count; 0 for a padding batch."""
    weight: float = 1.0
    """Factor of the mean loss over the samples."""
    ends_step: bool = True
    """Whether the optimizers step after it, and gradients are synchronized for that."""
    ends_epoch: bool = False
    is_recorded: bool = False
    """Whether the values of its step are written."""
    is_training: bool = True
    level: Level = "step"
    """What a logged value is of: a step; in hooks around the steps the epoch; or nothing."""
    rate_factor: float = 1.0
    """Factor of the learning rates in its step."""
    loader: str = ""
    """Name of its loader, if the loaders of an evaluation have names."""
