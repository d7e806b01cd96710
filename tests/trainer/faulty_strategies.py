"""Strategies with deliberate errors, which the conformance tests must detect.

``python -m faulty_strategies FOLDER`` trains each of them in each of :data:`WAYS`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tests.conformance import worker
from tests.conformance.rows import PROPERTIES

from my_project import trainer
from my_project.trainer.strategies.replicated import ddp

# The smallest tolerance and the largest ones.
WAYS = ("sgd", "bf16", "bf16 true", "fp16 true")
PROCESSES = 2


class SumForMean(ddp.DDP):
    """Sums gradients that it should average."""

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, **options: Any
    ) -> None:
        super().forward_backward(batch, batch_idx, weight=weight * self.data_replicas, **options)


class SkippedSynchronization(ddp.DDP):
    """Never averages: each process trains alone."""

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> None:
        super().forward_backward(batch, batch_idx, weight=weight, synchronize=False)


class SameData(ddp.DDP):
    """Every process reads the first process' part of each batch."""

    @property
    def data_index(self) -> int:
        return 0


FAULTS = {
    "sum_for_mean": SumForMean,
    "skipped_synchronization": SkippedSynchronization,
    "same_data": SameData,
}


def main(folder: Path) -> None:
    """Train all of them."""
    for name, strategy in FAULTS.items():
        trainer.register(name, strategy)
        for way in WAYS:
            one, result = PROPERTIES[way], folder / name / f"{way}.safetensors"
            result.parent.mkdir(parents=True, exist_ok=True)
            options = {"strategy": name, "devices": PROCESSES, **one.trainer}
            worker.train(result, one.subject, options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
