"""Strategies by properties: what each is shown to compute, how exactly, or why it refuses.

A strategy that is registered and has no row here fails the suite.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Property:
    """One way to train the subject.

    Args:
        subject: arguments of the subject.
        trainer: arguments of the trainer.
        tolerance: largest difference of a weight, or a logged loss, from one process'; 0: to the
            last bit.
    """

    tolerance: float
    subject: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


# Half precision rounds each process' part of a batch by itself: a rounding (2^-8 and 2^-11 of a
# value) in each of ten steps, which a rate of 0.1 and a momentum of 0.9 carry into the weights.
PROPERTIES = {
    "sgd": Property(1e-6),
    "adam": Property(1e-5, {"optimizer": "adam"}),
    "two optimizers": Property(1e-5, {"optimizer": "two"}),
    "scheduler": Property(1e-6, {"schedule": True}),
    "drop last": Property(1e-6, {"drop_last": True}),
    "accumulation": Property(1e-6, trainer={"accumulate_grad_batches": 2}),
    "clip norm": Property(1e-6, trainer={"gradient_clip_val": 0.1}),
    "clip value": Property(
        1e-6, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "bf16": Property(1e-2, trainer={"precision": "bf16-mixed"}),
    # Small enough that no scaled gradient overflows: a process' part of a batch has a larger mean
    # gradient than the whole, and so would skip other steps.
    "fp16": Property(1e-3, {"scale": 0.1}, {"precision": "16-mixed"}),
}


@dataclass(frozen=True)
class Row:
    """What is tried of a strategy.

    Args:
        world_sizes: numbers of processes.
        refused: properties that it refuses, with a part of its reason.
    """

    world_sizes: tuple[int, ...]
    refused: dict[str, str] = field(default_factory=dict)


MATRIX = {
    "single_device": Row((1,)),
    "ddp": Row((2, 3)),
}
