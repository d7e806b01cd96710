"""``mesh`` with several stages: a pipeline whose stages are sharded and replicated."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ....checkpoint import dtensors
from ....errors import ConfigurationError
from ....launch.collectives import How
from ....module import TrainingModule
from ....options import Options
from ... import memory
from ...fsdp.fsdp import FSDP, drop_groups
from ...fsdp.precision import cast_calls
from ...fsdp.units import unsharded
from ..pipeline.partition import ATTRIBUTE, Processes
from ..pipeline.strategy import Sequential, stage_memory, used_anywhere
from . import plan
from .on_mesh import OnMesh, device_mesh, drop_mesh, new_group
from .sizes import Sizes

# Options of FSDP's units, of which a stage is one.
_OF_UNITS = inspect.signature(FSDP).parameters.keys() - inspect.signature(Sequential).parameters


class PipelinedMesh(OnMesh, Sequential):
    """Pipeline parallelism over the stages of a mesh; see :class:`.strategy.Mesh`.

    The outermost dimension is the pipeline: neighboring ranks have the same stages. All parameters
    of a process are one FSDP unit: they are gathered when the first micro-batch of a batch begins,
    and their gradients are reduced after the last one of an optimizer step.

    The options are those of :class:`Sequential`; those of FSDP have no effect.
    """

    _unit: "_Unit | None" = None

    def __init__(
        self,
        data: int = -1,
        shard: int = 1,
        tensor: int = 1,
        pipeline: int = -1,
        context: int = 1,
        **options: Any,
    ) -> None:
        self.sizes = Sizes(data, shard, tensor, pipeline, context)
        lines = self.sizes.problems()
        lines += [
            f"strategy_options.{name} has no effect with pipeline={pipeline}: the stages of a "
            "process are one unit, gathered for a whole batch; remove it"
            for name in options
            if name in _OF_UNITS
        ]
        given = {name: value for name, value in options.items() if name not in _OF_UNITS}
        try:
            super().__init__(**given)
        except ConfigurationError as error:
            lines += error.problems
        if lines:
            raise ConfigurationError(lines)
        self.until_teardown = contextlib.ExitStack()

    def replicas(self, devices: int, nodes: int) -> int:
        found = super().replicas(devices, nodes)
        self.shape = replace(self.shape, stages=self.sizes.pipeline)
        self._check_processes(devices * nodes)
        return found

    def memory(self, sizes: memory.Sizes) -> memory.Memory:
        found = self.sizes.on(sizes.ranks)
        part = 1 / (found.tensor * found.shard)
        own = memory.divided(sizes, parameters=part, gradients=part, optimizer=part)
        return stage_memory(own.computing(1 / found.tensor), found.pipeline)

    def problems(self, options: Options, module: TrainingModule | None) -> list[str]:
        lines = super().problems(options, module)
        if module is None:
            return lines
        if of_plan := plan.problems_of(module, self.sizes):
            return lines + of_plan
        sequential = getattr(module, ATTRIBUTE, None)
        if self.sizes.tensor == 1 or not isinstance(sequential, nn.Sequential):
            return lines
        return lines + [
            f"{plan.ATTRIBUTE}[{layer.key!r}] is a {type(layer.style).__name__} of what a pipeline "
            f"divides; give styles to the children of {ATTRIBUTE}"
            for layer in plan.layers(module, self.sizes)
            if any(each is sequential for each in layer.module.modules())
        ]

    def make_processes(self, count: int) -> Processes:
        timeout = self.group_timeout
        sizes = {name: getattr(self.sizes, name) for name in ("data", "shard", "tensor")}
        names = [name for name, size in sizes.items() if size > 1] or ["data"]
        self._mesh = device_mesh({name: sizes[name] for name in names}, self.device.type, timeout)
        self._data: dist.ProcessGroup | None = None
        if self.sizes.replicas > 1:
            self._data = new_group(self.sizes.replicas, self.sizes.tensor, timeout)
        rank, world_size, rounds = self._layout.rank, self._layout.world_size, self.shape.rounds
        return Processes(rank, world_size, count, rounds, timeout, are_neighbors=False)

    def shard_stages(self, module: TrainingModule) -> None:
        own = self.ownership
        if self.sizes.tensor > 1:
            # Each process has created and moved the parameters of its stages already.
            found = plan.layers(module, self.sizes)
            layers = [each for each in found if own.has_layer(each.module)]
            plan.apply(layers, self._mesh["tensor"], lambda _: None)
            self.prepare_dtensors(layers, self._mesh["tensor"])
            own.refresh()
        if self.sizes.shard > 1:
            self._unit = self._shard(module)
            own.refresh()
        self._own = [each for each in module.named_parameters() if own.is_own(each[1])]

    def _shard(self, module: TrainingModule) -> "_Unit":
        half = self.precision.dtype
        own = set(filter(self.ownership.is_own, module.parameters()))
        sharded = own - set(unsharded(module, half))
        if any(each.dtype != torch.float32 for each in sharded):
            half = None
        unit = _Unit(module)
        fully_shard(
            unit,
            mesh=self._mesh[("data", "shard") if self.sizes.data > 1 else ("shard",)],
            reshard_after_forward=False,
            mp_policy=MixedPrecisionPolicy(
                half, torch.float32 if half else None, cast_forward_inputs=False
            ),
            ignored_params=set(module.parameters()) - sharded,
        )
        if half is not None:
            for handle in cast_calls(module, half):
                self.until_teardown.callback(handle.remove)
            # Gradients of micro-batches are added up in float32.
            gathered: Any = unit
            gathered.unshard()
            for each in unit.parameters():
                if each.dtype == half:
                    each.grad_dtype = torch.float32
            gathered.reshard()
        return unit

    def replicated(
        self, parameters: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], dist.ProcessGroup | None]:
        whole = [each for each in parameters if self._unit is None or not dtensors.is_sharded(each)]
        return whole, self._data

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        unit: Any = self._unit
        if unit is not None:
            unit.unshard()
        try:
            yield
        finally:
            if unit is not None:
                unit.reshard()

    def end_backward(self, *, synchronize: bool) -> None:
        if self._unit is not None:
            if synchronize:
                self._fill_missing(self._unit)
            self._unit.reduce(self.device.type, synchronize)
        if synchronize:
            self.complete_gradients(self._own, self._mesh)

    def _fill_missing(self, unit: "_Unit") -> None:
        """Give zero gradients to parameters that only other replicas have used in a step.

        FSDP reduces the gradients that a process has; all processes must have the same ones.
        """
        sharded = {name for name, each in self._own if dtensors.is_sharded(each)}
        own = [each for name, each in unit.module.named_parameters() if name in sharded]
        for each in used_anywhere(own, self._data):
            if each.grad is None:
                each.grad = torch.zeros_like(each, dtype=each.grad_dtype)

    def reduce(self, tensor: Tensor, how: How) -> Tensor:
        reduced = super().reduce(tensor, how)
        return reduced / self.sizes.tensor if how == "sum" else reduced

    def teardown(self) -> None:
        if self._unit is not None:
            drop_groups(self._unit)
        self._unit, self._data = None, None
        if hasattr(self, "_mesh"):
            drop_mesh(self._mesh)
        super().teardown()


class _Unit(nn.Module):
    """A module whose backward reduces the gradients of its parameters, as FSDP does in each.

    Its forward uses none of them: their gradients come from the backwards of the stages.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Tensor) -> Tensor:
        """Return a copy of a value."""
        return value.clone()

    def reduce(self, device_type: str, synchronize: bool) -> None:
        """Reduce and shard the gradients, or keep them to accumulate others; free parameters."""
        sharded: Any = self
        sharded.set_requires_gradient_sync(synchronize)
        with torch.enable_grad():
            self(torch.zeros((), device=device_type, requires_grad=True)).backward()
