"""``fairscale_fsdp``: FairScale's FullyShardedDataParallel.

Source: https://fairscale.readthedocs.io/en/stable/api/nn/fsdp.html
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...checkpoint import ShardedDict
from ...launch.cluster import Layout
from ...module import TrainingModule
from ...options import Options
from ...options.fields import PositiveInt
from .. import elementwise
from ..base import Stage, StepModule, StepOutput
from ..clipping import clip_distinct_gradients
from ..gradients import sparse
from ..gradients.same_use import ELSEWHERE, SameUse
from ..limits import Limits
from ..memory import Memory, Sizes, divided, memory
from ..optimizer_state import (
    group_names,
    load_optimizer_state,
    named_groups,
    parameter_names,
)
from ..optimizers import Optimization
from ..precision import Precision
from ..process_group import ProcessGroupStrategy
from ..weights import LocalWeights
from .parameter_shards import Contents, Shard, ShardedWeights, leave_cut, make_whole
from .sharded import PACKAGES, not_averaged

if TYPE_CHECKING:
    from .units import Unit

_FLOAT32 = "its parameters are sharded in float32; use 'bf16-mixed' or '16-mixed'"


class _OpaqueStep(StepModule):
    """Is called with a function that calls it."""

    def forward(self, call: Callable[..., Any]) -> Any:  # type: ignore[override]
        return call(super().forward)


class FairScaleFSDP(ProcessGroupStrategy):
    """FairScale: parameters, gradients and optimizer states sharded over the processes.

    Parameters are gathered while their unit computes. Optimizers must be elementwise, like SGD and
    Adam, because they see shards only. Every process must use the same parameters in a step;
    otherwise the run ends with an error that names them.

    Args:
        min_num_params: Minimum number of parameters of a child module to become a unit; parameters
            outside of units are gathered for the whole step.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    limits: Limits = Limits(
        shards_parameters=True,
        packages=PACKAGES,
        refused={
            "bf16-true": _FLOAT32,
            "16-true": _FLOAT32,
            "skipped_batches_of_a_step": "FairScale does not average gradients that are averaged "
            "already; use strategy='fsdp'",
            "manual_optimization": "FairScale gathers parameters for one forward and one backward "
            "of a step; use strategy='ddp_sharded'",
            "compile": "parameters change their shapes between a forward and the next; use "
            "strategy='ddp_sharded'",
        },
    )
    _wrapped: "Unit | None" = None

    def __init__(
        self, min_num_params: PositiveInt = 1_000_000, timeout_seconds: float = 600.0
    ) -> None:
        super().__init__(timeout_seconds)
        self.min_num_params = min_num_params
        self._around = ExitStack()

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        if module is None:
            if not options.sync_batchnorm or options.precision == "32-true":
                return []
            what = f"sync_batchnorm is not supported with precision={options.precision!r}"
            return [f"{what}: FairScale casts its buffers; use strategy='fsdp'"]
        unfit = [
            f"{name} is {each.dtype}; FairScale requires torch.float32; use strategy='fsdp'"
            if each.numel()
            else f"{name} is empty, and FairScale cannot shard it; use strategy='fsdp'"
            for name, each in module.named_parameters()
            if each.dtype != torch.float32 or not each.numel()
        ]
        return sparse.problems_of(module, "FairScale shards gradients") + unfit

    def memory(self, sizes: Sizes) -> Memory:
        part = 1 / sizes.ranks
        own = divided(sizes, parameters=part, gradients=part, optimizer=part)
        # A whole unit; its gradient is copied, and divided into padded chunks.
        gathered = sizes.unit + 2 * min(sizes.largest, sizes.unit)
        work = sizes.work(part) + gathered
        step = own.gradients + round(sizes.step * part)
        return memory(own, work=work, step=step, gathered=gathered)

    def connect(
        self, layout: Layout, devices: Sequence[torch.device], precision: Precision
    ) -> None:
        # Import before there is a process group, which would become a default argument.
        from . import units  # noqa: F401
        from .on_cpu import without_streams

        precision.skip_together()
        super().connect(layout, devices, precision)
        if self.device.type == "cpu":
            self._around.enter_context(without_streams())

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        make_whole(module)
        super().place(module)
        # Before sharding: the user may choose optimizers by the shapes of parameters.
        optimization = configure()
        elementwise.check(optimization.optimizers, "elements", self.device)
        self._shard_module(module)
        for optimizer in optimization.optimizers:
            for parameter, values in optimizer.state.items():  # some optimizers have initial state
                values.update(self._shards[id(parameter)].cut_values(values))
        return optimization

    def place(self, module: TrainingModule) -> None:
        make_whole(module)
        super().place(module)
        self._shard_module(module)

    def _shard_module(self, module: TrainingModule) -> None:
        from .units import named_units, shard_module

        self.start_equal((*module.parameters(), *module.buffers()))
        self._names = parameter_names(module)
        self._contents = Contents(module)
        self._shards = {id(each): Shard(each) for each in module.parameters()}
        # Each process keeps and writes some of the parameters gathered for a checkpoint.
        self._keepers = {
            each: index % self._layout.world_size for index, each in enumerate(self._shards)
        }
        leave_cut(module, self._shards.values())
        self._wrapped = shard_module(
            *(_OpaqueStep(module), module, self.device, self.min_num_params),
            *(self._reduce_group(), self.precision.dtype),
        )
        for each in module.parameters():
            each.grad_dtype = torch.float32  # in which those of micro-batches are added up
        self.same_use = SameUse(
            lambda: [
                (self._names[id(each)], each) for each in module.parameters() if each.requires_grad
            ],
            ELSEWHERE,
            self.timeout_seconds,
        )
        self.same_use.watch(named_units(self._wrapped))

    def _reduce_group(self) -> dist.ProcessGroup | None:
        """A separate group on GPUs: gradients are reduced while parameters are gathered."""
        group: dist.ProcessGroup | None = dist.group.WORLD
        if self.device.type != "cpu":
            group = dist.new_group(timeout=self.group_timeout)
        return group

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        found = super().forward_backward(batch, batch_idx, weight=weight, synchronize=synchronize)
        if synchronize:
            self._root.cut()
            for parameter in self.module.parameters():
                if parameter.grad is not None and parameter.grad.shape != parameter.shape:
                    raise not_averaged(self._names[id(parameter)])
        return found

    @property
    def _root(self) -> "Unit":
        if self._wrapped is None:
            raise RuntimeError("set up before the first forward")
        return self._wrapped

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        if self.same_use is not None:
            self.same_use.check(loss)
        super().backward(loss, synchronize=synchronize)

    def _call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        # Not the batch: the root would cast it to float16.
        return self._root(lambda step: step(stage, batch, batch_idx))

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        self.precision.unscale(optimization.optimizers)
        return clip_distinct_gradients(optimization.parameters, value, algorithm)

    # --- checkpoints ---------------------------------------------------------------------------

    def _model_state(self) -> dict[str, Any]:
        model = ShardedDict()
        gathered = {
            each: shard.gather(shard.parameter.data, self._keepers[each])
            for each, shard in self._shards.items()
        }
        for name, parameter in self._contents.parameters.items():
            whole = gathered[id(parameter)]
            if whole is not None:
                model[name] = whole
        if self._layout.is_main:
            model.update(self._contents.buffers())
        return model

    def _load_model(self, saved: Mapping[str, Any]) -> None:
        self._contents.check(saved.keys())
        with torch.no_grad():
            for name, parameter in self._contents.parameters.items():
                parameter.data.copy_(self._shards[id(parameter)].cut(saved[name]))
            for name, buffer in self._contents.buffers().items():
                buffer.copy_(saved[name])

    def weights(self) -> LocalWeights:
        from .units import units

        def cut() -> None:
            for unit in units(self._root):
                unit.cut()

        named = self._contents.parameters.items()
        return ShardedWeights(named, self._shards, self._keepers, cut)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        kept = ShardedDict()
        for parameter, values in optimizer.state.items():
            key = id(parameter)
            whole = self._shards[key].gather_values(values, self._keepers[key])
            if whole is not None:
                kept[self._names[key]] = whole
        names = group_names(optimizer, self._names)
        return {"state": kept, "param_groups": named_groups(optimizer.param_groups, names)}

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        shards = {self._names[each]: shard for each, shard in self._shards.items()}
        part = {
            # Unknown parameters are reported below.
            name: shards[name].cut_values(values) if name in shards else {}
            for name, values in saved["state"].items()
        }
        load_optimizer_state(optimizer, {**saved, "state": part}, self._names)

    def teardown(self) -> None:
        from .units import undo

        wrapped, self._wrapped = self._wrapped, None
        if wrapped is not None:
            undo(wrapped, self.module)
        self._around.close()
        super().teardown()
