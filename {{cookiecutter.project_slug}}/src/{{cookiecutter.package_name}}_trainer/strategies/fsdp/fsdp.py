"""``fsdp``: parameters, gradients and optimizer states sharded over the processes.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

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

from ...checkpoint import dtensors
from ...errors import ConfigurationError, UserError, nearest
from ...memory import meta_device
from ...module import TrainingModule
from ...options import Options
from ..gradients import sparse
from ..gradients.averaging import GradientAverage
from ..gradients.same_use import OPTION, SameUse, trained, unused, with_zeros
from ..optimizer_state import parameter_names
from ..optimizers import Optimization
from ..process_group import ProcessGroupStrategy
from ..step import Stage, StepModule
from ..weights import LocalWeights
from . import state as sharded_state
from .precision import AutocastCalls, gather_as_autocast
from .units import (
    can_shard,
    check_dtypes,
    choose_units,
    explain_sharded_use,
    outer_modules,
    unsharded,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_AUTOCAST = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}
# An engine's own environment may have an older one: its DTensors cannot be saved.
_OLDEST_TORCH = "2.10"

_ADVICE = f"set {OPTION}, which gathers all units for the whole step, or use strategy='ddp' with it"


class FSDP(ProcessGroupStrategy):
    """PyTorch FSDP: parameters, gradients and optimizer states sharded over the processes.

    Each unit is gathered while it is computed.
    Parameters without dimensions cannot be sharded; every process holds them.

    Args:
        unit_classes: Names of module classes to gather as a unit, such as a transformer block;
            default: select units by size.
        unit_parameters: Minimum number of parameters of a unit, without ``unit_classes``. On GPUs,
            no unit is inside a repeated block.
        offload: Keep the shards in CPU memory, and step there.
        parameter_dtype: Data type in which units are gathered: ``"bfloat16"`` with
            ``precision="bf16-mixed"``, ``"float16"`` with ``"16-mixed"``, ``"float32"`` with any.
            Default: half precision for parameters that autocast would cast (weights of linear
            layers, convolutions and attention), and unchanged for all others.
        reduce_dtype: Data type in which gradients are reduced; default: ``parameter_dtype`` if
            it is given, else ``"float32"``.
        reshard_after_forward: Reshard (free) a unit after its forward, and gather it again for its
            backward. False: faster, but all parameters stay in memory in between.
        reduce_every_microbatch: With gradient accumulation, reduce and shard gradients after each
            micro-batch. False: less communication, but each process holds full gradients.
        find_unused_parameters: For models that do not use all parameters in every step, also if
            ranks differ. All units are then gathered for the whole step, and gradients are not
            sharded until its end.
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.

    Raises:
        ConfigurationError: Unknown data type.
    """

    shards_parameters: bool = True
    keeps_gradients: ClassVar[bool] = True
    lacks: ClassVar[Mapping[str, str]] = {
        "accumulate_in_parts": "it is called reduce_every_microbatch now"
    }
    step: Any = None
    roots: Sequence[nn.Module] = ()
    same_use: SameUse | None = None
    averaged: GradientAverage | None = None
    _synchronizes = True  # the default of units

    def __init__(
        self,
        unit_classes: Sequence[str] | None = None,
        unit_parameters: int = 1_000_000,
        offload: bool = False,
        parameter_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
        reduce_every_microbatch: bool = True,
        find_unused_parameters: bool = False,
        timeout_seconds: float = 600.0,
    ) -> None:
        super().__init__(timeout_seconds)
        self.unit_classes = unit_classes
        self.unit_parameters = unit_parameters
        self.offload = offload
        self.mixed_precision = MixedPrecisionPolicy(
            param_dtype=_dtype("parameter_dtype", parameter_dtype),
            reduce_dtype=_dtype("reduce_dtype", reduce_dtype),
            # Autocast casts inputs where needed.
            cast_forward_inputs=False,
        )
        self.calls: AutocastCalls | None = None
        self.reshard_after_forward = reshard_after_forward
        self.reduce_every_microbatch = reduce_every_microbatch
        self.find_unused_parameters = find_unused_parameters
        self._used: set[str] = set()

    def problems(self, options: Options) -> list[str]:
        lines = []
        if torch.__version__ < _OLDEST_TORCH:
            lines.append(
                f"sharded parameters need torch {_OLDEST_TORCH} or newer, and this is torch "
                f"{torch.__version__}; use strategy='ddp', or another environment"
            )
        dtype = self.mixed_precision.param_dtype
        fitting = _AUTOCAST.get(dtype) if dtype is not None else None
        if fitting is not None and options.precision != fitting:
            lines.append(
                f"strategy_options.parameter_dtype gathers in {str(dtype).split('.')[1]} what is "
                f"computed with precision={options.precision!r}; use precision={fitting!r}"
            )
        return lines

    def problems_of(self, module: TrainingModule) -> list[str]:
        lines = sparse.problems_of(module, "FSDP shards gradients as whole tensors")
        if module.automatic_optimization:
            return lines
        if self.find_unused_parameters:
            lines.append(
                "strategy_options.find_unused_parameters does not support manual optimization with "
                "FSDP; "
                "use strategy='ddp', which needs no such option for it"
            )
        roots = outer_modules(module)
        holders = Counter(id(each) for root in roots for each in root.parameters())
        return lines + [
            f"{name} is in {holders[id(each)] or 'none'} of the model's children; a model with "
            "manual optimization is sharded child by child, so move it into one, or use "
            "strategy='ddp'"
            for name, each in module.named_parameters()
            if can_shard(each) and holders[id(each)] != 1
        ]

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        self.place(module)
        found = configure()
        if any(isinstance(each, torch.optim.Adafactor) for each in found.optimizers):
            raise ConfigurationError(
                "torch's Adafactor cannot step sharded parameters; use AdamW, or strategy='ddp'"
            )
        return found

    def place(self, module: TrainingModule) -> None:
        if any(dtensors.is_sharded(each) for each in module.parameters()):
            raise UserError(
                f"{type(module).__name__} is still sharded from a previous fit; create it again, "
                "and give a checkpoint, as in test(module, checkpoint=trainer.run_directory)"
            )
        self.module = module
        module.trainer_state = dataclasses.replace(module.trainer_state, device=self.device)
        self.mesh = self.make_mesh()
        self.step = StepModule(module)
        sharded_state.move_rest(module, self.device)
        self.shard_units(module)
        self._place_rest()
        self._names = parameter_names(module)
        self.watch_gradients()

    def shard_units(self, module: TrainingModule) -> None:
        """Choose units, and shard them."""
        # A backward inside a step reshards what the root unit has gathered, which later
        # operations in the step may still use.
        self.roots = [self.step] if module.automatic_optimization else outer_modules(module)
        units = self._choose_units(module)
        gathered = [*units.values(), *(root for root in self.roots if root not in units.values())]
        for unit in gathered:
            self._shard(unit)
        self._watch_calls(gathered)

    def watch_gradients(self) -> None:
        """Prepare what compares and averages gradients."""
        self.same_use = SameUse(self._leaves, _ADVICE, self.timeout_seconds)
        units = set(self._units())
        self.same_use.watch(
            {name: each for name, each in self.module.named_modules() if each in units}
        )
        self.averaged = GradientAverage(self.whole_parameters())

    def _choose_units(self, module: TrainingModule) -> dict[str, nn.Module]:
        if self.find_unused_parameters:
            return {}  # a rank that does not call a unit would not gather it
        on_gpus = self.device.type != "cpu"
        classes, smallest = self.unit_classes, self.unit_parameters
        return dict(choose_units(module, classes, smallest, whole_blocks=on_gpus))

    def whole_parameters(self) -> list[nn.Parameter]:
        """The parameters that every process holds."""
        return unsharded(self.module)

    def _place_rest(self) -> None:
        """Place parameters that are in no unit, if the model is sharded unit by unit: scalars."""
        meta_device.materialize(self.module, self.module)
        rest = (*self.whole_parameters(), *self.module.buffers())
        self.precision.cast_all(rest)
        for each in rest:
            each.data = each.data.to(self.device)
        self.start_equal(rest)

    def make_mesh(self) -> DeviceMesh:
        """The mesh over which parameters are sharded: all processes."""
        world: Any = dist.group.WORLD
        return DeviceMesh.from_group(world, self.device.type, mesh_dim_names=("shard",))

    def materialize(self, part: nn.Module) -> None:
        """Create, cast and move the parameters of a part of the module that is to be sharded."""
        meta_device.materialize(self.module, part)
        self.precision.cast(part)
        whole = [each for each in part.parameters() if not dtensors.is_sharded(each)]
        for each in whole:
            each.data = each.data.to(self.device).contiguous()  # torch shards no others
        self.start_equal(whole)

    def _shard(self, unit: nn.Module) -> None:
        self.materialize(unit)
        policy = self._policy(unit)
        on_cpu = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        sharded: Any = fully_shard(
            unit,
            mesh=self.mesh,
            reshard_after_forward=self.reshard_after_forward and not self.find_unused_parameters,
            mp_policy=policy,
            offload_policy=on_cpu if self.offload else OffloadPolicy(),
            ignored_params=set(unsharded(unit)),
        )
        if policy is not self.mixed_precision and self.precision.dtype is not None:
            for group in _groups(sharded):
                gather_as_autocast(group.fsdp_params, self.precision.dtype)

    def _policy(self, unit: nn.Module) -> MixedPrecisionPolicy:
        """The given policy; or with autocast, by default, gradients in float32."""
        given = self.mixed_precision
        own = [p for p in unit.parameters() if not dtensors.is_sharded(p) and can_shard(p)]
        check_dtypes(own)
        if self._casts and all(each.dtype == torch.float32 for each in own):
            return dataclasses.replace(given, reduce_dtype=given.reduce_dtype or torch.float32)
        return given

    @property
    def _casts(self) -> bool:
        """Whether the precision determines the data type in which each parameter is gathered."""
        return self.precision.dtype is not None and self.mixed_precision.param_dtype is None

    def _watch_calls(self, units: Sequence[nn.Module]) -> None:
        if self._casts:
            self.calls = AutocastCalls(self.precision)
            self.calls.watch(self.module, units)

    def call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        with explain_sharded_use():
            if self.calls is None:
                return self.step(stage, batch, batch_idx)
            with self.calls.step():
                return self.step(stage, batch, batch_idx)

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        # In manual optimization, accumulated gradients are visible to the optimizer and saved.
        reduce = self.reduce_every_microbatch or not self.module.automatic_optimization
        self._set_gradient_sync(synchronize or reduce)
        if self.find_unused_parameters:
            loss = self._with_unused(loss)
        elif self.same_use is not None:
            self.same_use.check(loss)
        with explain_sharded_use():
            super().backward(loss, synchronize=synchronize)
        if synchronize and self.averaged is not None and self.averaged.has_trained:
            self.averaged.average()
        if synchronize and self.find_unused_parameters:
            self._leave_out_unused()

    def _set_gradient_sync(self, synchronize: bool) -> None:
        """Set it on all units if it changes: torch traverses all modules for this."""
        if synchronize is self._synchronizes:
            return
        self._synchronizes = synchronize
        for root in self.roots:
            if isinstance(root, FSDPModule):
                root.set_requires_gradient_sync(synchronize)

    def _leaves(self) -> list[tuple[str, Tensor]]:
        """The parameters used in forward, by name: full parameters, if they are gathered."""
        found: list[tuple[str, Tensor]] = []
        for unit in self._units():
            for group in _groups(unit):
                for each in group.fsdp_params:
                    if each.sharded_param.requires_grad:
                        name = self._names.get(id(each.sharded_param), str(each._param_fqn))
                        found.append((name, getattr(each, "_unsharded_param", each.sharded_param)))
        rest = self.whole_parameters()
        return found + [(self._names[id(each)], each) for each in rest if each.requires_grad]

    def _with_unused(self, loss: Tensor) -> Tensor:
        """Extend a loss so that all ranks get gradients of the same parameters."""
        parameters = self._leaves()
        left_out = unused(loss, parameters)
        self._used.update(name for name, _ in parameters if name not in left_out)
        return with_zeros(loss, list(left_out.values()))

    def _leave_out_unused(self) -> None:
        """Do not step parameters that no rank has used, as in one process."""
        named = trained(self.module)
        used = torch.tensor([float(name in self._used) for name, _ in named])
        for (_, parameter), is_used in zip(named, self.reduce(used, "max").tolist(), strict=True):
            if not is_used:
                parameter.grad = None
        self._used.clear()

    def load_model(self, saved: Mapping[str, Any]) -> None:
        sharded_state.load_model(self.module, saved)

    def weights(self) -> LocalWeights:
        def reshard() -> None:
            for unit in self._units():
                unit.reshard()

        return LocalWeights(self.module.named_parameters(remove_duplicate=False), reshard)

    def load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        sharded_state.load_optimizer(self.module, optimizer, saved)

    def teardown(self) -> None:
        if self.same_use is not None:
            self.same_use.close()
        self.same_use = None
        if self.calls is not None:
            self.calls.close()
        self.calls = None
        if self.averaged is not None:
            self.averaged.close()
        for unit in self._units():
            drop_groups(unit)
        if self.step is not None:
            getattr(self.mesh, "_pg_registry", {}).clear()
        self.step, self.roots = None, ()
        super().teardown()

    def _units(self) -> list[FSDPModule]:
        modules = () if self.step is None else self.step.modules()
        return [each for each in modules if isinstance(each, FSDPModule)]


def _groups(unit: FSDPModule) -> list[Any]:
    """torch's parameter groups of a unit."""
    state: Any = unit._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)  # a single group before torch 2.12
    return [each for each in (many or [state._fsdp_param_group]) if each is not None]


def drop_groups(unit: Any) -> None:
    """Drop a unit's references to its process groups, and so to gloo's threads.

    A thread that outlives its group may abort the interpreter at exit.
    """
    for group in _groups(unit):
        for info in (group.mesh_info, group.post_forward_mesh_info):
            for name in ("shard_process_group", "replicate_process_group"):
                if getattr(info, name, None) is not None:
                    setattr(info, name, None)


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in _DTYPES:
        raise ConfigurationError(
            f"strategy_options.{option}={name!r} is unknown{nearest(name, _DTYPES)}"
        )
    return _DTYPES[name]
