"""``ddp_sharded``: FairScale's ShardedDataParallel over its sharded optimizers (OSS).

Source: https://fairscale.readthedocs.io/en/stable/api/nn/sharded_ddp.html
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import UserError, refuse
from ...launch.cluster import Layout
from ...module import TrainingModule
from ...options import Options
from ..base import Devices, StepModule, StepOutput
from ..clipping import clip_gradients
from ..engine_optimizers import EngineGroups, problems_of, requiring_grad, sharded_optimizer
from ..gradients import sparse
from ..gradients.averaging import GradientAverage
from ..gradients.same_use import OPTION, SameUse, trained
from ..limits import Limits
from ..memory import Memory, Sizes, divided, memory
from ..optimizer_state import parameter_names
from ..optimizers import Optimization
from ..precision import Precision
from ..process_group import ProcessGroupStrategy
from ..user_code import HookGuard

if TYPE_CHECKING:
    from .replica import Replica

_ADVICE = f"set {OPTION}"


class DDPSharded(ProcessGroupStrategy):
    """FairScale: gradients and optimizer states sharded over the processes.

    A gradient is averaged on the process that steps its parameter and broadcasts the new value.

    Args:
        find_unused_parameters: For models that do not use all parameters in every step, also if
            ranks differ. Every process then keeps all averaged gradients.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    limits: Limits = Limits(
        refused={
            "skipped_batches_of_a_step": "FairScale does not average gradients that are averaged "
            "already; use strategy='fsdp'"
        },
        packages={"fairscale": "make fairscale, or pip install '.[fairscale]'"},
    )
    wrapped: "Replica | None" = None

    def __init__(
        self, find_unused_parameters: bool = False, timeout_seconds: float = 600.0
    ) -> None:
        super().__init__(timeout_seconds)
        self.find_unused_parameters = find_unused_parameters
        self._sharded: list[Any] = []

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        reason = "FairScale reduces only dense gradients"
        return [] if module is None else sparse.problems_of(module, reason)

    def memory(self, sizes: Sizes) -> Memory:
        share = sizes.largest_share(in_order=True)
        sharded = divided(sizes, gradients=share, optimizer=share)
        # How many gradients wait to be reduced depends on the network: all of them at most.
        step = sharded.gradients + sizes.step_of(share)
        note = "at most: gradients wait for the network"
        return memory(sharded, work=sizes.work(), step=step, note=note)

    def connect(self, layout: Layout, devices: Devices, precision: Precision) -> None:
        # Import before there is a process group, which would become a default argument.
        from . import replica  # noqa: F401

        precision.skip_together()
        super().connect(layout, devices, precision)

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        from fairscale.optim.oss import OSS

        from .replica import Replica

        self.place(module)
        self.start_equal((*module.parameters(), *module.buffers()))
        configured = configure()
        _check(configured, parameter_names(module))
        refuse(problems_of(configured.optimizers, "parameters", "ddp_sharded"))
        if self.find_unused_parameters or not module.automatic_optimization:
            # OSS broadcasts those that are trainable when it is created; others may be unfrozen.
            with requiring_grad(configured.parameters, True):
                optimization = configured.replaced(partial(sharded_optimizer, OSS))
            self.averaged = GradientAverage(module.parameters())
        else:
            optimization = configured.replaced(partial(sharded_optimizer, OSS))
            self.wrapped = Replica(StepModule(module), optimization.optimizers)
            self.steps["training"] = self.wrapped
            self.same_use = SameUse(lambda: trained(module), _ADVICE, self.timeout_seconds)
            if self.layout.world_size > 1:
                instead = f"set gradient_clip_val instead, or {_ADVICE}"
                self.around_hooks = HookGuard(module, instead, gradients="some")
        self._sharded = list(optimization.optimizers)
        self.engine_groups = EngineGroups(self._sharded)
        return optimization

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        if self.same_use is not None:
            self.same_use.begin("training")
        output = super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize)
        if self.wrapped is not None and synchronize:
            for parameter in self.wrapped.not_averaged():
                raise UserError(
                    f"{parameter_names(self.module)[id(parameter)]} was used in a micro-batch of "
                    "this step but not in its last, in which FairScale averages gradients; use "
                    "accumulate_grad_batches=1, or strategy='ddp'"
                )
        return output

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        if self.same_use is not None and synchronize:
            self.same_use.check(loss)
        super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)
        if self.wrapped is not None:
            self.wrapped.finish()

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        if self.wrapped is None:  # each process has all gradients
            return super().clip(optimization, value, algorithm)
        self.precision.unscale(optimization.optimizers)
        return clip_gradients(optimization.parameters, value, algorithm, lambda _: True)

    def teardown(self) -> None:
        # Remaining references to the process group would keep gloo's threads alive.
        wrapped, self.wrapped = self.wrapped, None
        if wrapped is not None:
            wrapped.drop_group()
        for optimizer in self._sharded:
            optimizer.group = None
        self._sharded = []
        super().teardown()


def _check(optimization: Optimization, names: Mapping[int, str]) -> None:
    steps = [Optimization([one], []).parameters for one in optimization.optimizers]
    counted = Counter(id(parameter) for parameters in steps for parameter in parameters)
    lines = [
        f"configure_optimizers: {names.get(key, 'a parameter')} is in two optimizers; FairScale "
        "gives a parameter to one process, by its one optimizer; use strategy='ddp_zero1'"
        for key, count in counted.items()
        if count > 1
    ]
    for optimizer, parameters in zip(optimization.optimizers, steps, strict=True):
        dtypes = sorted({str(tensor.dtype) for tensor in parameters if tensor.requires_grad})
        if len(dtypes) > 1:
            lines.append(
                f"configure_optimizers: {type(optimizer).__name__} has parameters of "
                f"{', '.join(dtypes)}; FairScale keeps them in one buffer of one dtype; give each "
                "dtype an optimizer, or use strategy='ddp'"
            )
    refuse(lines)
