"""One measurement of the GPU benchmark. Imports nothing heavy: refusals come at once."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

# Before the line of JSON that a measurement ends with.
MARK = "@result "
PRECISION = "bf16-mixed"
NAMES = {"loop": "hand-written loop", "bundled": "this trainer", "lightning": "Lightning"}
# Under either name; the first that is installed.
LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def lightning_name() -> str | None:
    """Return the package by which Lightning is installed here; ``None`` without it."""
    for name in LIGHTNING:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    return None


@dataclass(frozen=True)
class Job:
    """One measurement: the model, its batches, and how many steps of them."""

    device: str = "cuda"
    vocabulary: int = 50_304
    context: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    batch: int = 8
    warmup: int = 10
    steps: int = 40

    @property
    def total(self) -> int:
        """All steps: the window ends when the step after it begins."""
        return self.warmup + self.steps + 1


# A smoke run: its numbers say nothing.
QUICK = Job(
    "cpu", vocabulary=64, context=16, width=32, depth=2, heads=2, batch=2, warmup=2, steps=4
)
