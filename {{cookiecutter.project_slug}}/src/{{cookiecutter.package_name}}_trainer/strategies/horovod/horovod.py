"""``horovod``: gradients averaged by Horovod, launched by horovodrun or mpirun.

Source: https://horovod.readthedocs.io/en/stable/pytorch.html
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...errors import UserError
from ...launch.cluster import Layout
from ...module import TrainingModule
from ..base import Devices, StepOutput
from ..engine_optimizers import EngineGroups, not_created, requiring_grad, take_over
from ..gradients.averaging import GradientAverage, copy_gradient, leaving_out_unused
from ..gradients.sparse import sparse_parameters
from ..limits import Limits
from ..memory import Memory, Sizes, memory
from ..optimizer_state import parameter_names
from ..optimizers import Optimization
from ..precision import Precision
from ..process_group import ProcessGroupStrategy

_FUSION = 128 * 2**20  # Horovod's default, in bytes
_NO_BF16 = "Horovod's collectives do not support bfloat16; use '16-mixed', or strategy='ddp'"


class Horovod(ProcessGroupStrategy):
    """One process per device, launched by horovodrun or mpirun; Horovod averages the gradients.

    The trainer's own communication (logging, run directory) uses a torch process group.

    Args:
        scale_learning_rate: Multiply learning rates by the number of processes.
        compression: Compression of gradients: ``"none"`` or ``"fp16"``.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    limits: Limits = Limits(
        refused={
            "bf16-mixed": _NO_BF16,
            "bf16-true": _NO_BF16,
            "skipped_batches_of_a_step": "its optimizers average once per step; use strategy='ddp'",
            "manual_optimization": "its optimizers need one backward per step; use strategy='ddp'",
        },
        launched_by="horovodrun -np N … or mpirun -np N …",
        sources=("horovod", "openmpi"),
        packages={"horovod": "make horovod"},
    )

    def __init__(
        self,
        scale_learning_rate: bool = True,
        compression: Literal["none", "fp16"] = "none",
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.scale_learning_rate, self.compression = scale_learning_rate, compression
        self._hooks: list[RemovableHandle] = []
        self._synchronizes = True
        if scale_learning_rate:
            twice = (
                "Horovod multiplies rates by its size already; set "
                "strategy_options={scale_learning_rate: false} to scale otherwise"
            )
            refused = {**self.limits.refused, "learning_rate_scaling": twice}
            self.limits = replace(self.limits, refused=refused, always=("learning_rate_scaling",))

    def memory(self, sizes: Sizes) -> Memory:
        # Gradients are copied before they are averaged, and gathered in a buffer for that.
        buckets = 0 if _is_exact(sizes.accelerator) else _FUSION
        return memory(sizes, work=sizes.work() + sizes.largest, buckets=buckets, mark="unverified")

    def connect(self, layout: Layout, devices: Devices, precision: Precision) -> None:
        import horovod.torch as hvd

        seconds = str(max(1, round(self.timeout_seconds)))
        for name in ("GLOO_TIMEOUT_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS"):
            os.environ.setdefault(f"HOROVOD_{name}", seconds)
        if devices[0].type == "cuda" and not (hvd.cuda_built() or hvd.rocm_built()):
            problem = "strategy='horovod' on GPUs: Horovod was built for CPUs only"
            advice = "build it where nvcc is (HOROVOD_GPU_OPERATIONS=NCCL make horovod)"
            raise UserError(f"{problem}; {advice}, or use strategy='ddp'")
        if _is_exact(devices[0].type):
            os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
        if not hvd.is_initialized():  # MPI is initialized once per process
            hvd.init()
        if hvd.size() != layout.world_size:
            raise UserError(
                f"Horovod counts {hvd.size()} process(es) where {layout.source} started "
                f"{layout.world_size}: it was built without MPI, or told to use gloo; start it by "
                "horovodrun --gloo, or install MPI (apt install libopenmpi-dev) and `make horovod`"
            )
        super().connect(layout, devices, precision)

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        import horovod.torch as hvd

        self.place(module)
        for parameter in (*module.parameters(), *module.buffers()):
            parameter.data = parameter.data.contiguous()  # Horovod reduces and broadcasts no others
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        configured = configure()  # it may freeze parameters
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._copy_gradient)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        # They may be unfrozen later, and have no hook of Horovod's.
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._sparse = [p for p in sparse_parameters(module).values() if p.requires_grad]
        self.averaged = GradientAverage([*frozen, *self._sparse])
        names = parameter_names(module)
        self._optimization = configured.replaced(lambda optimizer: self._wrap(optimizer, names))
        self.engine_groups = EngineGroups(self._optimization.optimizers)
        return self._optimization

    def _wrap(self, optimizer: Optimizer, names: Mapping[int, str]) -> Any:
        import horovod.torch as hvd

        named = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
        compression = getattr(hvd.Compression, self.compression)
        # It would hook into these, and create dense zeros if a process has no sparse gradient.
        with requiring_grad(self._sparse, False):
            try:
                wrapped = hvd.DistributedOptimizer(optimizer, named, compression=compression)
            except (AttributeError, TypeError) as error:
                raise not_created(optimizer, error) from None
        take_over(optimizer, wrapped, wrapped)
        return wrapped

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        self._synchronizes = synchronize
        # Hooks count down and average at 0: with 1 they average now, with 2 they wait.
        for optimizer in self._optimization.optimizers:
            delays: dict[Any, int] = optimizer._allreduce_delay  # type: ignore[attr-defined]
            delays.update(dict.fromkeys(delays, 1 if synchronize else 2))
        return super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize)

    def _copy_gradient(self, parameter: Tensor) -> None:
        if self._synchronizes:
            copy_gradient(parameter)

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)
        optimizers: list[Any] = self._optimization.optimizers if synchronize else []
        for optimizer in optimizers:  # wait for the averages
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            with leaving_out_unused(parameters):  # also of those that were frozen since
                optimizer.synchronize()

    def step_optimizer(self, optimizer: Any) -> None:
        with optimizer.skip_synchronize():
            super().step_optimizer(optimizer)

    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        super().teardown()


def _is_exact(device_type: str) -> bool:
    """Whether runs must be bit-identical: which gradients are fused depends on timing."""
    return device_type == "cpu" or torch.are_deterministic_algorithms_enabled()
