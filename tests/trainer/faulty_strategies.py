"""Strategies with deliberate errors, which the conformance tests must detect.

``python -m faulty_strategies FOLDER`` trains each of them in its ways.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
from my_project_trainer.strategies.base import DataLayout, StepOutput
from my_project_trainer.strategies.replicated import ddp
from tests.conformance import worker
from tests.conformance.rows import PROPERTIES

# The smallest tolerance and the largest ones.
WAYS = ("sgd", "bf16", "bf16 true", "fp16 true")
CLIPPED = ("clip norm", "clip value")
PROCESSES = 2


class SumForMean(ddp.DDP):
    """Sums gradients that it should average."""

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, **options: Any
    ) -> StepOutput:
        weight *= self.data.replicas
        return super().forward_backward(batch, batch_idx, weight=weight, **options)


class SkippedSynchronization(ddp.DDP):
    """Never averages: each process trains alone."""

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        return super().forward_backward(batch, batch_idx, weight=weight, synchronize=False)


class SameData(ddp.DDP):
    """Every process reads the first process' part of each batch."""

    @property
    def data(self) -> DataLayout:
        return replace(super().data, index=0)


class Unclipped(ddp.DDP):
    """Computes the norm of the gradients, and clips nothing."""

    def clip(self, optimization: Any, value: float, algorithm: str) -> Any:
        return super().clip(optimization, float("inf"), "norm")


class ClippedAlone(ddp.DDP):
    """Each process clips by half of the bound, as if the norms of two processes added up."""

    def clip(self, optimization: Any, value: float, algorithm: str) -> Any:
        return super().clip(optimization, value / 2, algorithm)


FAULTS = {
    "sum_for_mean": (SumForMean, WAYS),
    "skipped_synchronization": (SkippedSynchronization, WAYS),
    "same_data": (SameData, WAYS),
    "unclipped": (Unclipped, CLIPPED),
    "clipped_alone": (ClippedAlone, CLIPPED),
}
PAIRS = [(fault, way) for fault, (_, ways) in FAULTS.items() for way in ways]


def main(folder: Path) -> None:
    for name, (strategy, ways) in FAULTS.items():
        trainer.register(name, strategy)
        for way in ways:
            one, result = PROPERTIES[way], folder / name / f"{way}.safetensors"
            result.parent.mkdir(parents=True, exist_ok=True)
            # A fit that checks weights ends when those of ranks differ.
            unchecked = {"nonfinite_loss": "ignore", **one.trainer}
            worker.train(result, one.subject, {"strategy": name, "devices": PROCESSES, **unchecked})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
