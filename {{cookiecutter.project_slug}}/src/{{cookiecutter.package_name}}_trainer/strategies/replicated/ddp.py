"""``ddp``: one process per device, gradients averaged in backward.

Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
and https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...errors import refuse
from ...module import TrainingModule
from ...options.values import PositiveInt
from ..base import StepModule
from ..engine_optimizers import EngineGroups, problems_of, sharded_optimizer
from ..gradients.averaging import GradientAverage
from ..gradients.same_use import OPTION, left_out, trained, unused
from ..gradients.sparse import sparse_parameters
from ..memory import Memory, Sizes, divided, memory
from ..optimizers import Optimization
from ..process_group import ProcessGroupStrategy

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

HookName = Literal["none", "fp16", "bf16", "powersgd"]
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
_SEED = 0  # of PowerSGD


class DDP(ProcessGroupStrategy):
    """One process per device, each with the whole model; gradients are averaged in backward.

    Args:
        find_unused_parameters: For models that do not use all parameters in every step.
        bucket_cap_mb: Size of a gradient bucket in MiB.
        communication_hook: Compression of gradients: ``"none"``, ``"fp16"``, ``"bf16"`` or
            ``"powersgd"``.
        powersgd_rank: Rank of the matrices that PowerSGD (Vogels et al. 2019,
            https://arxiv.org/abs/1905.13727) sends instead of a gradient.
        powersgd_start_step: First step that PowerSGD compresses, at least the second.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    _wrapped: DistributedDataParallel | None = None

    def __init__(
        self,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float = 25.0,
        communication_hook: HookName = "none",
        powersgd_rank: PositiveInt = 1,
        powersgd_start_step: PositiveInt = 1000,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb = bucket_cap_mb
        self.communication_hook = communication_hook
        self.powersgd_rank = powersgd_rank
        self.powersgd_start_step = powersgd_start_step
        self._powersgd: PowerSGDState | None = None
        self._ignored: list[Any] = []
        self._trained: list[tuple[str, Tensor]] = []

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        if module.automatic_optimization:
            excluded = self._exclude(module)
            # They may be unfrozen later, which DDP does not notice.
            frozen = [each for each in module.parameters() if not each.requires_grad]
            if rest := [*frozen, *excluded]:
                self.averaged = GradientAverage(rest)
            # DDP raises an error for a module without trainable parameters.
            self._trained = trained(module)
            if not excluded or len(excluded) < len(self._trained):
                self._wrapped = self.wrap(self._step_module)
        else:
            self.start_equal((*module.parameters(), *module.buffers()))
            self.averaged = GradientAverage(module.parameters())
        return configure()

    def _exclude(self, module: TrainingModule) -> Sequence[Tensor]:
        """Exclude sparse and complex gradients from DDP: not all backends and hooks reduce them."""
        unfit = sparse_parameters(module)
        found = {
            name: each
            for name, each in module.named_parameters()
            if each.requires_grad and (name in unfit or each.is_complex())
        }
        self.start_equal(found.values())
        self._ignored = list(found.values())
        names = [f"module.{name}" for name in found]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            self._step_module, names
        )
        return self._ignored

    def memory(self, sizes: Sizes) -> Memory:
        # Gradients are views of the buckets, which stay; PowerSGD keeps the error of each.
        kept = sizes.gradients * (2 if self.communication_hook == "powersgd" else 1)
        buckets = kept - sizes.gradients
        work, step = sizes.gradients + sizes.activations, sizes.gradients + sizes.step
        return memory(sizes, work=work, step=step, buckets=buckets)

    def wrap(self, module: StepModule) -> DistributedDataParallel:
        """Wrap the module in torch's DDP."""
        # Without device_ids: with them, DDP would traverse each batch, which is already on the
        # device, and fail on types that cannot be rebuilt from their items, such as defaultdict.
        wrapped = DistributedDataParallel(
            module,
            find_unused_parameters=self.find_unused_parameters,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
        )
        if not self.find_unused_parameters:
            _rebuild_buckets(wrapped)
        self._register_hook(wrapped)
        return wrapped

    def _register_hook(self, wrapped: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.communication_hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.communication_hook == "bf16":
            wrapped.register_comm_hook(None, _bf16)
        elif self.communication_hook == "powersgd":
            self._powersgd = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=self.powersgd_rank,
                start_powerSGD_iter=self.powersgd_start_step,
                random_seed=_SEED,
            )
            wrapped.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        super().backward(loss, synchronize=synchronize)
        if not synchronize or self._wrapped is None:
            return
        try:  # now: DDP itself raises in the next step, if it still waits for gradients
            self._wrapped.reducer._check_reducer_finalized()
        except RuntimeError:
            names = unused(loss, self._trained)
            instead = f"where a step may leave parameters out, or freezes them later, set {OPTION}"
            raise left_out(list(names), instead) from None

    def rank_local_state(self) -> dict[str, Tensor]:
        powersgd = self._powersgd
        if powersgd is None:
            return {}
        words = powersgd.rng.get_state(legacy=False)["state"]
        state = {
            "iteration": torch.tensor([powersgd.iter, words["pos"]]),
            "random": torch.from_numpy(words["key"].astype(np.int64)),
        }
        for name in _MEMORIES:  # this rank's error feedback of the compression
            for bucket, tensor in getattr(powersgd, name).items():
                state[f"{name}/{bucket}"] = tensor
        return state

    def load_rank_local_state(self, state: Mapping[str, Tensor]) -> None:
        powersgd = self._powersgd
        if powersgd is None or "iteration" not in state:  # or saved by another strategy
            return
        powersgd.iter, position = state["iteration"].tolist()
        keys = state["random"].numpy().astype(np.uint32)
        powersgd.rng.set_state(("MT19937", keys, position, 0, 0.0))
        for key, tensor in state.items():
            name, _, bucket = key.partition("/")
            if bucket:
                getattr(powersgd, name)[int(bucket)] = tensor.to(self.device)

    def teardown(self) -> None:
        wrapped, self._wrapped = self._wrapped, None
        if wrapped is not None:
            # The reducer must not outlive the group: its destructor would join gloo's threads while
            # holding the GIL, and one of them may wait for the GIL to free a tensor.
            del wrapped.reducer, wrapped.logger
        for each in self._ignored:
            del each._ddp_ignored  # set by torch; in another fit, DDP may average it
        self._ignored = []
        super().teardown()


class DDPZeRO1(DDP):
    """``ddp`` with optimizer states sharded over the processes.

    Each process steps its shard and broadcasts the new values.

    Source: https://docs.pytorch.org/docs/stable/distributed.optim.html#torch.distributed.optim.ZeroRedundancyOptimizer
    """

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimization = super().setup(module, configure)
        refuse(problems_of(optimization.optimizers, "parameters", "ddp_zero1"))
        sharded = optimization.replaced(partial(sharded_optimizer, ZeroRedundancyOptimizer))
        self.engine_groups = EngineGroups(sharded.optimizers, grows=True)
        return sharded

    def memory(self, sizes: Sizes) -> Memory:
        share = sizes.largest_share()
        own = replace(divided(sizes, optimizer=share), step=sizes.step_of(share))
        return super().memory(own)


def _bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    # torch's own function is a wrapper whose signature register_comm_hook does not accept.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]


def _rebuild_buckets(wrapped: DistributedDataParallel) -> None:
    """Rebuild DDP's gradient buckets before the first step instead of after it.

    DDP rebuilds its buckets once, in the order of the first gradients. The position of an element
    in a bucket determines the order in which the values of more than two ranks are summed, and so
    its last bit: a resumed run would sum its first step in the initial order, and the
    uninterrupted run in the rebuilt order. An empty backward leaves only the rebuilt order.
    """
    ignored = wrapped.parameters_to_ignore
    parameters: list[Tensor] = [
        each
        for name, each in wrapped.module.named_parameters()
        if each.requires_grad and name not in ignored
    ]
    wrapped.reducer.prepare_for_backward([])
    torch.stack([each.sum() * 0 for each in parameters]).sum().backward()
    # Gradients are views of the first buckets and would keep them in memory.
    for parameter in parameters:
        parameter.grad = None
    wrapped.reducer._rebuild_buckets()
