"""``ddp``: one process a device, gradients averaged in backward.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .. import rendezvous
from ..cluster import Layout
from ..errors import ConfigurationError
from ..launch.failures import DIRECTORY
from ..module import TrainingModule
from ..optimization import Optimization
from ..precision import Precision
from ..watchdog import watchdog
from .averaging import GradientAverage
from .communication_hooks import CommunicationHook
from .limits import Limits
from .single_device import SingleDevice, Stage, StepModule

# The second is Lightning's.
BACKENDS = ("TRAINER_BACKEND", "PL_TORCH_DISTRIBUTED_BACKEND")


class DDP(SingleDevice):
    """Every process holds the whole model and reads its part of each batch.

    Args:
        find_unused_parameters: for models that leave parameters out in some steps.
        static_graph: for models that use the same parameters in every step, some several times.
        bucket_cap_mb: size of a gradient bucket in MiB.
        communication_hook: how gradients travel: ``"none"`` as they are, ``"fp16"``, ``"bf16"``,
            ``"powersgd"``.
        powersgd_rank: of the matrices that PowerSGD sends instead of a gradient.
        powersgd_start_step: gradients travel as they are before this step, at least the second.
        timeout_seconds: after which a collective that a rank does not join fails on the others.
    """

    limits: ClassVar[Limits] = Limits()

    wrapped: DistributedDataParallel | None = None

    def __init__(
        self,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float = 25.0,
        communication_hook: str = "none",
        powersgd_rank: int = 1,
        powersgd_start_step: int = 1000,
        timeout_seconds: float = 600.0,
    ) -> None:
        if find_unused_parameters and static_graph:
            raise ConfigurationError(
                "strategy_options: a static_graph has no unused parameters to find; give one of "
                "find_unused_parameters and static_graph"
            )
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.bucket_cap_mb = bucket_cap_mb
        self.hook = CommunicationHook(communication_hook, powersgd_rank, powersgd_start_step)
        self.timeout_seconds = timeout_seconds

    def connect(
        self, layout: Layout, own_devices: Sequence[torch.device], precision: Precision
    ) -> None:
        super().connect(layout, own_devices, precision)
        self.init_process_group(layout, self.device)
        watchdog.arm(os.environ.get(DIRECTORY))

    def init_process_group(self, layout: Layout, device: torch.device) -> None:
        """Form the process group: NCCL on GPUs (and gloo for what is on the CPU), gloo on CPUs."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        for name in BACKENDS:
            backend = os.environ.get(name, backend)
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        dist.init_process_group(
            backend,
            store=rendezvous.connect_store(layout, timeout),
            rank=layout.rank,
            world_size=layout.world_size,
            timeout=timeout,
        )

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        if module.automatic_optimization:
            self.wrapped = self.wrap(self.step)
        else:
            _start_equal(module)
            self.averaged = GradientAverage(module.parameters())
        return configure()

    def place(self, module: TrainingModule) -> None:
        super().place(module)
        self.step = self.make_step(module)

    def make_step(self, module: TrainingModule) -> StepModule:
        """What runs the user's steps on this process' devices."""
        return StepModule(module)

    def wrap(self, module: StepModule) -> DistributedDataParallel:
        """Give the module to torch's DDP."""
        wrapped = DistributedDataParallel(
            module,
            device_ids=[self.device] if self.has_one_gpu else None,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        self.hook.register(wrapped)
        if not (self.static_graph or self.find_unused_parameters):
            _settle_buckets(wrapped, self.hook)
        return wrapped

    @property
    def has_one_gpu(self) -> bool:
        """Whether this process computes on one GPU alone."""
        return self.device.type == "cuda" and len(self.devices) == 1

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
        waits = self.wrapped is not None and not synchronise
        with self.wrapped.no_sync() if waits and self.wrapped else nullcontext():
            super().forward_backward(batch, batch_idx, weight=weight, synchronise=synchronise)

    def call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        if stage == "training" and self.wrapped is not None:
            return self.wrapped(stage, batch, batch_idx)
        return self.step(stage, batch, batch_idx)

    def backward(self, loss: Tensor, *, synchronise: bool) -> None:
        super().backward(loss, synchronise=synchronise)
        if synchronise and self.wrapped is None:
            self.averaged.average()

    def begin_evaluation(self) -> None:
        # Training leaves each process with its own BatchNorm statistics; rank 0's are the model's.
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)

    def own_state(self) -> dict[str, Tensor]:
        return self.hook.state()

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.hook.load_state(state)

    def teardown(self) -> None:
        watchdog.disarm()
        wrapped, self.wrapped = self.wrapped, None
        if wrapped is not None:
            # The reducer must not outlive the group: its destructor would join gloo's threads with
            # the interpreter locked, while one of them waits for the lock to free a tensor.
            del wrapped.reducer, wrapped.logger
        if dist.is_initialized():
            dist.destroy_process_group()


def _start_equal(module: TrainingModule) -> None:
    """Rank 0's weights on every process, as torch's DDP does it."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def _settle_buckets(wrapped: DistributedDataParallel, hook: CommunicationHook) -> None:
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
    hook.restart()
