"""One measurement of the GPU benchmark. Imports nothing heavy: refusals come at once."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

# Before the line of JSON that a measurement ends with.
MARK = "@result "
PRECISION = "bf16-mixed"
NAMES = {
    "loop": "hand-written loop",
    "bundled": "this trainer",
    "bundled_fsdp": "this trainer, fsdp",
    "lightning": "Lightning",
    "loop_compiled": "hand-written loop, compiled",
    "bundled_compiled": "this trainer, compiled",
}
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

    @property
    def parameters(self) -> int:
        """Of the model: two embeddings, blocks, and a norm; the last layer is the first's."""
        block = 12 * self.width**2 + 13 * self.width
        return (self.vocabulary + self.context + 2) * self.width + self.depth * block

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward; Chowdhery et al. 2022 (PaLM), appendix B."""
        return 6 * self.parameters + 12 * self.depth * self.width * self.context


# A smoke run: its numbers say nothing.
QUICK = Job(
    "cpu", vocabulary=64, context=16, width=32, depth=2, heads=2, batch=2, warmup=2, steps=4
)
