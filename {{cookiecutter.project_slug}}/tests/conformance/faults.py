"""Strategies that are wrong on purpose: the suite must tell them from the right ones."""

from typing import Any

from my_project.trainer.strategies.replicated import ddp


class SumForMean(ddp.DDP):
    """Adds gradients up where it should average them."""

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
    """Has every process read the first one's part of each batch."""

    @property
    def data_index(self) -> int:
        return 0


FAULTS = {
    "sum_for_mean": SumForMean,
    "skipped_synchronization": SkippedSynchronization,
    "same_data": SameData,
}
