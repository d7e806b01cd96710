"""``fsdp`` and ``hsdp``: parameters, gradients and optimizer states sharded over processes.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...checkpoint import dtensors
from ...errors import UserError, one_line
from ...launch import collectives
from ...memory import meta_device
from ...module import TrainingModule
from ...options import Options
from ..base import STAGES, Stage
from ..clipping import clip_gradients, is_first_holder
from ..engine_optimizers import step_alone
from ..gradients import sparse
from ..gradients.averaging import GradientAverage
from ..gradients.same_use import OPTION, SameUse, trained, unused, with_zeros
from ..limits import Limits
from ..memory import Memory, Sizes, divided, memory
from ..optimizer_state import parameter_names, shard_state
from ..optimizers import Optimization
from ..process_group import ProcessGroupStrategy
from ..user_code import WeightGuard, forbid_calls, refuse_sharded
from ..weights import LocalWeights
from . import state as sharded_state
from .state import groups_split
from .units import can_shard, choose_units, explain_sharded_use, outer_modules, unsharded

_ADVICE = f"set {OPTION}, which gathers all units for the whole step, or use strategy='ddp' with it"


class FSDP(ProcessGroupStrategy):
    """PyTorch FSDP: parameters, gradients and optimizer states sharded over the processes.

    Each unit is gathered while it is computed. Every process holds parameters without dimensions.

    Args:
        unit_classes: Names of module classes to gather as a unit, such as a transformer block;
            default: select units by size.
        unit_parameters: Minimum number of parameters of a unit, without ``unit_classes``. On GPUs,
            no unit is inside a repeated block.
        offload: Keep the shards in CPU memory, and step there.
        parameter_dtype: With ``"bf16-mixed"`` and ``"16-mixed"``, units are gathered and computed
            in half precision. ``"float32"``: under autocast, which keeps its casts of weights.
        reduce_dtype: Data type in which gradients are reduced; default: ``"float32"``, or that of
            the parameters with ``"bf16-true"`` and ``"16-true"``.
        reshard_after_forward: Reshard (free) a unit after its forward, and gather it again for its
            backward. False: faster, but all parameters stay in memory in between.
        reduce_every_microbatch: With gradient accumulation, reduce and shard gradients after each
            micro-batch. False: less communication, but each process holds full gradients.
        find_unused_parameters: For models that do not use all parameters in every step, also if
            ranks differ. Units stay gathered, and gradients whole, until the end of the step.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
    """

    limits: Limits = Limits(shards_parameters=True)
    _step_module: Any = None
    roots: Sequence[nn.Module] = ()
    whole_blocks: bool | None = None  # default: on GPUs
    half: torch.dtype | None = None  # in which units compute without autocast, if it is another
    _synchronizes = True  # the default of units

    def __init__(
        self,
        unit_classes: Sequence[str] | None = None,
        unit_parameters: int = 1_000_000,
        offload: bool = False,
        parameter_dtype: Literal["float32"] | None = None,
        reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        reshard_after_forward: bool = True,
        reduce_every_microbatch: bool = True,
        find_unused_parameters: bool = False,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.unit_classes, self.unit_parameters = unit_classes, unit_parameters
        self.offload, self.parameter_dtype = offload, parameter_dtype
        self.reduce_dtype: torch.dtype | None = getattr(torch, reduce_dtype or "", None)
        self.reshard_after_forward = reshard_after_forward
        self.reduce_every_microbatch = reduce_every_microbatch
        self.find_unused_parameters = find_unused_parameters
        self._used = set[str]()
        self._casts: list[RemovableHandle] = []
        self._parameter_groups: list[Any] = []

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        if torch.__version__ < "2.10":  # an engine's own: its DTensors cannot be saved
            need = f"need torch 2.10 or newer, and this is torch {torch.__version__}"
            return [f"sharded parameters {need}; use strategy='ddp', or another environment"]
        if module is None:
            return []
        lines = sparse.problems_of(module, "FSDP shards gradients as whole tensors")
        lines += sharded_state.hooked(module)
        if module.automatic_optimization:
            return lines
        if self.find_unused_parameters:
            problem = "does not support manual optimization with FSDP"
            advice = "use strategy='ddp', which needs no such option for it"
            lines.append(f"strategy_options.find_unused_parameters {problem}; {advice}")
        holders = Counter(id(p) for root in outer_modules(module) for p in root.parameters())
        return lines + [
            f"{name} is in {holders[id(tensor)] or 'none'} of the model's children; a model with "
            "manual optimization is sharded child by child, so move it into one, or use "
            "strategy='ddp'"
            for name, tensor in module.named_parameters()
            if can_shard(tensor) and holders[id(tensor)] != 1
        ]

    def memory(self, sizes: Sizes) -> Memory:
        return self.sharded_memory(sizes, sizes.ranks)

    def sharded_memory(self, sizes: Sizes, shards: int) -> Memory:
        """The memory of a rank that holds one of so many shards."""
        share = 1 / shards
        # In backward a unit is gathered, and the one before it; its gradient is copied.
        mine = replace(sizes, step=round(sizes.step * share))
        mine = divided(mine, parameters=share, gradients=share, optimizer=share)
        gathered = 4 * sizes.unit if self.reshard_after_forward else sizes.parameters
        need = memory(mine, work=sizes.work(share) + gathered, gathered=gathered, mark="unverified")
        if not self.offload or sizes.is_on_host:
            return need
        host = sizes.devices * (mine.parameters + mine.gradients + mine.optimizer + mine.step)
        peak = sizes.activations + gathered
        return replace(need, peak=peak, parameters=0, gradients=0, optimizer=0, host=host)

    def place(self, module: TrainingModule) -> None:
        refuse_sharded(module)
        sharded_state.refuse_scripts(module)
        self.module = module
        module.trainer_state = replace(module.trainer_state, device=self.device)
        self.mesh = self.make_mesh()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._initializer = meta_device.Initializer(module, rank, ranks, self.device)
        self._step_module = sharded_state.HeldBatchStep(module)
        self.steps = dict.fromkeys(STAGES, self._step_module.run)
        sharded_state.move_rest(module, self.device)
        before = dict(module.named_parameters(remove_duplicate=False))
        self.shard_units(module)
        # What is in no unit, if the model is sharded unit by unit: scalars.
        sources = self._initializer.materialize(module)
        rest = (*self.whole_parameters(), *module.buffers())
        self.precision.cast(rest)
        for tensor in rest:
            tensor.data = tensor.data.to(self.device)
        self.start_equal(rest, sources)
        sharded_state.follow(module, before)
        sharded_state.HANDLERS[sharded_state.READ] = sharded_state.read_number
        self._names = parameter_names(module)
        self.watch_gradients()
        self._guard = WeightGuard(whole=map(id, self.whole_parameters()))

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        with sharded_state.user_hook(module, "configure_optimizers"):
            optimization = configure()
        for optimizer in optimization.optimizers:
            shard_state(optimizer)
        return optimization

    def shard_units(self, module: TrainingModule) -> None:
        if self.parameter_dtype is None:
            self.half, self.precision.dtype = self.precision.dtype, None  # without autocast
        # A backward inside a step reshards the root unit, which later operations may still use.
        self.roots = [self._step_module] if module.automatic_optimization else outer_modules(module)
        units = [*self._choose_units(module).values()]
        for unit in [*units, *(root for root in self.roots if root not in units)]:
            self._shard(unit)
        if self.half is not None:
            self._casts = sharded_state.cast_calls(module, self.half)

    def watch_gradients(self) -> None:
        """Prepare what compares and averages gradients."""
        seconds = self.timeout_seconds, collectives.compile_seconds
        self.same_use = SameUse(self._leaves, _ADVICE, *seconds)
        units, named = set(self._units()), self.module.named_modules()
        self._parameter_groups = [group for unit in units for group in _groups(unit)]
        self.same_use.watch({name: module for name, module in named if module in units})
        self.averaged = GradientAverage(self.whole_parameters())

    def _choose_units(self, module: TrainingModule) -> dict[str, nn.Module]:
        if self.find_unused_parameters:
            return {}  # a rank that does not call a unit would not gather it
        blocks = self.device.type != "cpu" if self.whole_blocks is None else self.whole_blocks
        classes, smallest = self.unit_classes, self.unit_parameters
        return dict(choose_units(module, classes, smallest, whole_blocks=blocks))

    def whole_parameters(self) -> list[nn.Parameter]:
        """The parameters that every process holds."""
        return unsharded(self.module, self.half)

    def make_mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded: all processes."""
        world: Any = dist.group.WORLD
        return DeviceMesh.from_group(world, self.device.type, mesh_dim_names=("shard",))

    def new_mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        """Create a mesh of all processes; neighboring ranks are along its last dimension."""
        ranks = torch.arange(self.layout.world_size).view(*sizes.values())
        pairs = zip(ranks.shape, ranks.stride(), strict=True)
        groups = [self.new_group(size, stride) for size, stride in pairs]
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=tuple(sizes))

    def new_group(self, size: int, stride: int) -> dist.ProcessGroup:
        """Create groups of ranks, each a stride above the one before; return this process'."""
        ranks = torch.arange(self.layout.world_size).view(-1, size, stride)
        lines = ranks.movedim(1, -1).reshape(-1, size).tolist()
        # Not by split_group, which would split NCCL's communicator once for all of them: torch 2.13
        # crashes in gloo's part of it, in the second process group of a process.
        group, _ = dist.new_subgroups_by_enumeration(lines, timeout=self.group_timeout)
        made: dist.ProcessGroup = group
        return made

    def materialize(self, module: nn.Module) -> None:
        """Create, cast and move the parameters of a part of the module that is to be sharded."""
        sources = self._initializer.materialize(module)
        self.precision.cast((*module.parameters(), *module.buffers()))
        new = [parameter for parameter in module.parameters() if not dtensors.is_sharded(parameter)]
        for tensor in new:
            tensor.data = tensor.data.to(self.device).contiguous()  # torch shards no others
        self.start_equal(new, sources)

    def _shard(self, unit: nn.Module) -> None:
        self.materialize(unit)
        on_cpu = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        fully_shard(
            unit,
            mesh=self.mesh,
            reshard_after_forward=self.reshard_after_forward and not self.find_unused_parameters,
            mp_policy=self._policy(unit),
            offload_policy=on_cpu if self.offload else OffloadPolicy(),
            ignored_params=set(unsharded(unit, self.half)),
        )

    def _policy(self, unit: nn.Module) -> MixedPrecisionPolicy:
        parameters = [p for p in unit.parameters() if not dtensors.is_sharded(p) and can_shard(p)]
        if len(dtypes := sorted({str(p.dtype) for p in parameters if p.requires_grad})) > 1:
            raise UserError(
                f"a unit of FSDP has parameters of {' and '.join(dtypes)}; give those of one dtype "
                "a module, and name its class in strategy_options.unit_classes, or use "
                "strategy='ddp'"
            )
        half = self.half if all(p.dtype == torch.float32 for p in parameters) else None
        reduced = self.reduce_dtype or (torch.float32 if half else None)
        return MixedPrecisionPolicy(half, reduced, cast_forward_inputs=False)

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        if self.same_use is not None:
            self.same_use.begin(stage)
        by_hand = stage == "training" and not self.module.automatic_optimization
        assignable = sharded_state.assignable() if by_hand else contextlib.nullcontext()
        guard = self._guard.layers(self._step_module, stage, by_hand)
        with explain_sharded_use(self.half), guard, assignable:
            outputs = super().forward(stage, batch, batch_idx)
        if stage == "training" and self.same_use is not None and self.module.may_skip_batches:
            self.same_use.note("ends its forward")  # peers may wait in a unit, and not skip
        return outputs

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        for group in self._parameter_groups:
            # torch looks for dtypes in a unit's first forward, where all of it may be frozen.
            if vars(group).get("_orig_dtype", True) is None:
                group._init_mp_dtypes()
        # In manual optimization, accumulated gradients are visible to the optimizer and saved.
        reduce = self.reduce_every_microbatch or not self.module.automatic_optimization
        self._set_gradient_sync(synchronize or reduce)
        if self.find_unused_parameters:  # so that all ranks get gradients of the same ones
            parameters = self._leaves()
            left_out = unused(loss, parameters)
            self._used.update(name for name, _ in parameters if name not in left_out)
            loss = with_zeros(loss, list(left_out.values()))
        elif self.same_use is not None:
            self.same_use.check(loss)
        with explain_sharded_use(self.half):
            super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)
        if synchronize and self.find_unused_parameters:
            self._leave_out_unused()

    def _set_gradient_sync(self, synchronize: bool) -> None:
        """Set it on all units if it changes: torch traverses all modules for this."""
        for root in self.roots if synchronize is not self._synchronizes else ():
            if isinstance(root, FSDPModule):
                root.set_requires_gradient_sync(synchronize)
        self._synchronizes = synchronize

    def _leaves(self) -> list[tuple[str, Tensor]]:
        """The parameters used in forward, by name: full parameters, if they are gathered."""
        used: list[tuple[str, Tensor]] = []
        for unit in self._units():
            for group in _groups(unit):
                for param in group.fsdp_params:
                    if param.sharded_param.requires_grad:
                        name = self._names.get(id(param.sharded_param), str(param._param_fqn))
                        used.append((name, getattr(param, "_unsharded_param", param.sharded_param)))
        return used + [(self._names[id(p)], p) for p in self.whole_parameters() if p.requires_grad]

    def _leave_out_unused(self) -> None:
        """Do not step parameters that no rank has used, as in one process."""
        named = trained(self.module)
        used = torch.tensor([float(name in self._used) for name, _ in named])
        for (_, parameter), is_used in zip(named, self.reduce(used, "max").tolist(), strict=True):
            if not is_used:
                parameter.grad = None
        self._used.clear()

    @contextlib.contextmanager
    def around_hooks(self, hook: str) -> Iterator[None]:
        try:
            with sharded_state.user_hook(self.module, hook):
                yield
        except (AssertionError, RuntimeError) as error:
            if not re.search("DTensor|[Ss]hard|FSDP", str(error)):
                raise
            raise UserError(
                f"{hook} cannot do this with sharded tensors (DTensors), or mixes them with "
                f"others: {one_line(error)}; set gradient_clip_val to clip; convert masks by torch."
                "distributed.tensor.distribute_tensor; or use strategy='ddp'"
            ) from error

    def clip(self, optimization: Optimization, value: float, algorithm: str) -> Tensor | None:
        self.precision.unscale(optimization.optimizers)
        return clip_gradients(optimization.parameters, value, algorithm, is_first_holder)

    def step_optimizer(self, optimizer: Optimizer) -> None:
        try:
            with groups_split(optimizer), sharded_state.assignable():
                step_alone(optimizer, self.precision, self.device, self._has_copies)
        except (LookupError, RuntimeError, UserError) as error:
            if not re.search("DTensor|placement|sharding strategy|sharded", str(error)):
                raise
            name = type(optimizer).__name__
            problem = f"{name} cannot step sharded parameters ({one_line(error)})"
            raise UserError(f"{problem}; use AdamW, or strategy='ddp'") from error

    def _has_copies(self, optimizer: Optimizer) -> bool:
        """Whether other processes hold what it steps, too."""
        parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        size = self.layout.world_size
        return size > 1 and any(
            not dtensors.is_sharded(parameter)
            or parameter.device_mesh.size() != size
            or any(place.is_replicate() for place in parameter.placements)
            for parameter in parameters
        )

    def weights(self) -> LocalWeights:
        def reshard() -> None:
            for unit in self._units():
                unit.reshard()

        return LocalWeights(self.module.named_parameters(remove_duplicate=False), reshard)

    def teardown(self) -> None:
        for handle in self._casts:
            handle.remove()
        self._casts, self._parameter_groups = [], []
        for unit in self._units():
            drop_groups(unit)
        if self._step_module is not None:
            getattr(self.mesh, "_pg_registry", {}).clear()
            forbid_calls(self.module)
        self._step_module, self.roots = None, ()
        if self.layout.world_size == 1:  # otherwise a program could read a number of a shard
            sharded_state.HANDLERS.pop(sharded_state.READ, None)
        super().teardown()

    def _units(self) -> list[FSDPModule]:
        modules = () if self._step_module is None else self._step_module.modules()
        return [module for module in modules if isinstance(module, FSDPModule)]


def _groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)  # a single group before torch 2.12
    return [group for group in (many or [state._fsdp_param_group]) if group is not None]


def drop_groups(unit: FSDPModule) -> None:
    """Drop a unit's references to its process groups, whose threads may not outlive them."""
    for group in _groups(unit):
        for info in (group.mesh_info, group.post_forward_mesh_info):
            for name in ("shard_process_group", "replicate_process_group"):
                if getattr(info, name, None) is not None:
                    setattr(info, name, None)
