"""``ddp2``: one process per node, dp over its devices, gradients averaged across nodes."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...data import Feed, MicroBatch, transfer
from ...module import TrainingModule
from ..limits import Limits
from .ddp import DDP
from .dp import NO_MANUAL, NO_SYNCED_NORM, NOT_COMPILED, ReplicatedStep


class DDP2(DDP):
    """``dp`` inside a node, ``ddp`` across nodes.

    ``training_step_end`` can compute a loss over the node's whole batch.
    """

    limits: Limits = Limits(
        refused={
            "manual_optimization": NO_MANUAL,
            "sync_batchnorm": NO_SYNCED_NORM,
            "compile": NOT_COMPILED,
        }
    )

    step: ReplicatedStep

    def make_step(self, module: TrainingModule) -> ReplicatedStep:
        return ReplicatedStep(module, self.devices, self.precision.parameter_dtype)

    def read_loss(self, outputs: Any) -> Tensor:
        return self.step.read_loss(outputs)

    @staticmethod
    def local_processes(devices: int) -> int:
        return 1

    def replicas(self, devices: int, num_nodes: int) -> int:
        return num_nodes

    def batches(self, feed: Feed, epoch: int, start: int) -> Iterator[MicroBatch]:
        return transfer.read_pinned(feed, epoch, start, self.device)

    def move(self, batch: Any) -> Any:
        return batch  # scattered later
