"""``ddp``: one process a device, gradients averaged in backward.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

import datetime
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .. import rendezvous
from ..cluster import Layout
from ..module import TrainingModule
from ..optimization import Optimization
from ..precision import Precision
from .single_device import Limits, SingleDevice, Stage, StepModule

BACKEND = "TRAINER_BACKEND"


class DDP(SingleDevice):
    """Every process holds the whole model and reads its part of each batch.

    Args:
        find_unused_parameters: for models that leave parameters out in some steps.
        bucket_cap_mb: size of a gradient bucket in MiB.
        timeout_seconds: after which a collective that a rank does not join fails on the others.
    """

    limits: ClassVar[Limits] = Limits()

    wrapped: DistributedDataParallel

    def __init__(
        self,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float = 25.0,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb = bucket_cap_mb
        self.timeout_seconds = timeout_seconds

    def connect(self, layout: Layout, device: torch.device, precision: Precision) -> None:
        super().connect(layout, device, precision)
        self.init_process_group(layout, device)

    def init_process_group(self, layout: Layout, device: torch.device) -> None:
        """Form the process group: NCCL on GPUs (and gloo for what is on the CPU), gloo on CPUs."""
        default = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        dist.init_process_group(
            os.environ.get(BACKEND, default),
            store=rendezvous.connect_store(layout, timeout),
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timeout,
        )

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        self.wrapped = self.wrap(StepModule(module))
        return configure()

    def wrap(self, module: StepModule) -> DistributedDataParallel:
        """Give the module to torch's DDP."""
        wrapped = DistributedDataParallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=self.find_unused_parameters,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        _settle_buckets(wrapped)
        return wrapped

    @staticmethod
    def local_processes(devices: int) -> int:
        return devices

    @staticmethod
    def replicas(devices: int, num_nodes: int) -> int:
        return devices * num_nodes

    @property
    def data_replicas(self) -> int:
        return self.layout.world_size

    @property
    def data_index(self) -> int:
        return self.layout.rank

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronise: bool
    ) -> None:
        # DDP reads in forward whether the backward that follows is to average.
        with nullcontext() if synchronise else self.wrapped.no_sync():
            super().forward_backward(batch, batch_idx, weight=weight, synchronise=synchronise)

    def call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        if stage == "training":
            return self.wrapped(stage, batch, batch_idx)
        return super().call_step(stage, batch, batch_idx)

    def begin_evaluation(self) -> None:
        # Training leaves each process with its own BatchNorm statistics; rank 0's are the model's.
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)

    def teardown(self) -> None:
        wrapped = self.__dict__.pop("wrapped", None)
        if wrapped is not None:
            # The reducer must not outlive the group: its destructor would join gloo's threads with
            # the interpreter locked, while one of them waits for the lock to free a tensor.
            del wrapped.reducer, wrapped.logger
        if dist.is_initialized():
            dist.destroy_process_group()


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Have DDP arrange its gradient buckets before the first step rather than after it.

    DDP rebuilds its buckets once, in the order in which the first gradients came. Where an element
    lies in a bucket decides in which order more than two ranks' values are summed, and so its last
    bit: a run that is resumed at step k would sum that step in the first arrangement and the
    uninterrupted run in the second. An empty backward makes the rebuilt arrangement the only one.
    """
    parameters: list[Tensor] = [each for each in wrapped.parameters() if each.requires_grad]
    wrapped.reducer.prepare_for_backward([])
    torch.stack([each.sum() * 0 for each in parameters]).sum().backward()
    wrapped.reducer._rebuild_buckets()
    for parameter in parameters:
        parameter.grad = None
