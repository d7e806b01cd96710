"""``ddp``: one process per device, gradients averaged in backward.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...module import TrainingModule
from ...options.values import PositiveInt
from ..base import RankLocal, StepModule
from ..gradients import user_hooks
from ..gradients.averaging import GradientAverage
from ..gradients.same_use import OPTION, left_out, trained, unused
from ..gradients.sparse import sparse_parameters
from ..memory import Memory, Sizes, memory
from ..optimizers import Optimization
from ..process_group import ProcessGroupStrategy
from . import communication_hooks as hooks
from .buckets import rebuild_buckets


class DDP(ProcessGroupStrategy):
    """One process per device, each with the whole model; gradients are averaged in backward.

    Args:
        find_unused_parameters: For models that do not use all parameters in every step.
        bucket_cap_mb: Size of a gradient bucket in MiB.
        communication_hook: Compress gradients: ``"none"``, ``"fp16"``, ``"bf16"``, ``"powersgd"``.
        powersgd_rank: Rank of the matrices that PowerSGD (Vogels et al. 2019,
            https://arxiv.org/abs/1905.13727) sends instead of a gradient.
        powersgd_start_step: First step that PowerSGD compresses, at least the second.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    wrapped: DistributedDataParallel | None = None

    def __init__(
        self,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float = 25.0,
        communication_hook: hooks.Name = "none",
        powersgd_rank: PositiveInt = 1,
        powersgd_start_step: PositiveInt = 1000,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb, self.communication_hook = bucket_cap_mb, communication_hook
        self.powersgd_rank, self.powersgd_start_step = powersgd_rank, powersgd_start_step
        self._ignored: list[Any] = []
        self._trained: list[tuple[str, Tensor]] = []
        self._handles: list[Any] = []  # of hooks

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        if not module.automatic_optimization:
            self.start_equal((*module.parameters(), *module.buffers()))
            self.averaged = GradientAverage(module.parameters())
            return self.sharded(configure())
        optimization = configure()  # it may freeze parameters
        step = self.step_module(module)
        excluded = self._exclude(module, step, set(map(id, optimization.parameters)))
        # They may be unfrozen later, which DDP does not notice.
        frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        if rest := [*frozen, *excluded.values()]:
            self.averaged = GradientAverage(rest)
        self._trained = [pair for pair in trained(module) if pair[0] not in excluded]
        if self._trained or not excluded:  # DDP raises an error if no parameter is trained
            self.wrapped = self.steps["training"] = self.wrap(step)
        if self.layout.is_main:
            user_hooks.note(self._trained)
        stepped = self.sharded(optimization)
        pairs = zip(optimization.optimizers, stepped.optimizers, strict=True)
        self._handles = user_hooks.copy_in_steps(dict(self._trained).values(), pairs)
        return stepped

    def sharded(self, optimization: Optimization) -> Optimization:
        """The optimizers that step in place of the user's."""
        return optimization

    @contextmanager
    def around_hooks(self, hook: str) -> Iterator[None]:
        if hook == "on_before_optimizer_step":
            user_hooks.copy_gradients(dict(self._trained).values())
        yield

    def step_module(self, module: TrainingModule) -> StepModule:
        """The module that torch's DDP wraps, whose forward is the user's step."""
        return StepModule(module)

    def _exclude(
        self, module: TrainingModule, step: StepModule, optimized: AbstractSet[int]
    ) -> dict[str, Tensor]:
        """Exclude parameters from DDP: those of no optimizer, such as averages, may be unused.

        So are sparse and complex ones: not all backends and hooks reduce their gradients.
        """
        unfit = sparse_parameters(module)
        excluded = {
            name: p
            for name, p in trained(module)
            if name in unfit or p.is_complex() or id(p) not in optimized
        }
        self.start_equal(excluded.values())
        self._ignored = list(excluded.values())
        names = [f"module.{name}" for name in excluded]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, names)
        return excluded

    def memory(self, sizes: Sizes) -> Memory:
        # Gradients are views of the buckets, which stay; PowerSGD keeps the error of each.
        buckets = sizes.gradients if self.communication_hook == "powersgd" else 0
        work, step = sizes.gradients + sizes.activations, sizes.gradients + sizes.step
        return memory(sizes, work=work, step=step, buckets=buckets)

    def wrap(self, module: StepModule) -> DistributedDataParallel:
        # Without device_ids: with them, DDP would traverse each batch, which is already on the
        # device, and fail on types that cannot be rebuilt from their items, such as defaultdict.
        wrapped = DistributedDataParallel(
            module,
            find_unused_parameters=self.find_unused_parameters,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        if not self.find_unused_parameters:
            rebuild_buckets(wrapped)
        rank, start_step = self.powersgd_rank, self.powersgd_start_step
        made = hooks.register(wrapped, self.communication_hook, rank, start_step)
        if made is not None:
            load = partial(hooks.load_state, made, self.device)
            self.rank_local = RankLocal(partial(hooks.state, made), load)
        return wrapped

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)
        if not synchronize or self.wrapped is None:
            return
        try:  # now: DDP itself raises in the next step, if it still waits for gradients
            self.wrapped.reducer._check_reducer_finalized()
        except RuntimeError:
            names = unused(loss, self._trained)
            instead = f"where a step may leave parameters out, or freezes them later, set {OPTION}"
            raise left_out(list(names), instead) from None

    def teardown(self) -> None:
        wrapped, self.wrapped = self.wrapped, None
        if wrapped is not None:
            # The reducer must not outlive the group: its destructor would join gloo's threads while
            # holding the GIL, and one of them may wait for the GIL to free a tensor.
            del wrapped.reducer, wrapped.logger
        for handle in self._handles:
            handle.remove()
        for parameter in self._ignored:
            del parameter._ddp_ignored  # set by torch; in another fit, DDP may average it
        self._ignored, self._handles = [], []
        super().teardown()
