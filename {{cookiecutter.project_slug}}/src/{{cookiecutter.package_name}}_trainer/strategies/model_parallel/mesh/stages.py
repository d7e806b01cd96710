"""Stages of a pipeline whose parameters are sharded: over a tensor group, and by torch's FSDP."""

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel

from ....checkpoint import dtensors
from ....launch import collectives
from ....module import TrainingModule
from ...fsdp.fsdp import drop_groups
from ..pipeline.gradients import Placement
from ..pipeline.partition import ATTRIBUTE, Ownership
from ..pipeline.processes import Processes
from . import groups, plan
from .by_mesh import check_equal, settle
from .plan import Layer
from .sizes import Sizes
from .styles import LossParallel, ShardedRandomness


def problems_of(module: TrainingModule, sizes: Sizes) -> list[str]:
    """One line for each style of a plan that would apply to several stages as a whole."""
    sequential = getattr(module, ATTRIBUTE, None)
    if sizes.tensor == 1 or not isinstance(sequential, nn.Sequential):
        return []
    return [
        f"{plan.ATTRIBUTE}[{layer.key!r}] is a {type(layer.style).__name__} of what a pipeline "
        f"divides; give styles to the children of {ATTRIBUTE}"
        for layer in plan.layers(module, plan.read(module, sizes))
        if any(each is sequential for each in layer.module.modules())
        and not (layer.module is sequential and _is_only_random(layer))
    ]


def _is_only_random(layer: Layer) -> bool:
    return isinstance(layer.style, ShardedRandomness) and layer.style.style is None


class MeshStages(Placement):
    """The processes that have the same stages are a mesh of replicas, shards and tensor groups.

    All parameters of a process are one FSDP unit: they are gathered when the first micro-batch of a
    batch begins, and their gradients are reduced after the last one of an optimizer step.

    Args:
        processes: The processes of the pipelines.
        sizes: The sizes of the whole mesh.
        device_type: Type of the ranks' devices.
        timeout: Timeout of collectives.
    """

    def __init__(
        self, processes: Processes, sizes: Sizes, device_type: str, timeout: datetime.timedelta
    ) -> None:
        super().__init__(processes)
        self._sizes = sizes
        names = ("data", "shard", "tensor")
        found = {name: size for name, size in sizes if name in names and size > 1}
        self._mesh: DeviceMesh = groups.device_mesh(found or {"data": 1}, device_type, timeout)
        self._names = tuple(found)
        self._data: dist.ProcessGroup | None = None
        if sizes.replicas > 1:
            ranks = torch.arange(dist.get_world_size()).view(-1, sizes.replicas, sizes.tensor)
            lines = ranks.movedim(1, -1).reshape(-1, sizes.replicas).tolist()
            self._data = groups.new_group(lines, timeout)
        self._unit: _Unit | None = None
        self._own: list[tuple[str, nn.Parameter]] = []
        self._random: list[Layer] = []
        self._is_checked = False
        self._until_close = contextlib.ExitStack()

    def shard(self, module: TrainingModule, ownership: Ownership) -> None:
        if self._sizes.tensor > 1:
            self._shard_layers(module, ownership)
            ownership.refresh()
        if self._sizes.shard > 1:
            self._shard_unit(module, ownership)
            ownership.refresh()
        self._own = [each for each in module.named_parameters() if ownership.is_own(each[1])]

    def _shard_layers(self, module: TrainingModule, ownership: Ownership) -> None:
        sequential = getattr(module, ATTRIBUTE)
        found = plan.layers(module, plan.read(module, self._sizes))
        self._random = [layer for layer in found if layer.module is sequential]
        own = [
            layer
            for layer in found
            if layer.module is not sequential and ownership.has_layer(layer.module)
        ]
        # Each process has created and moved the parameters of its stages already.
        plan.apply(own, self._mesh["tensor"], lambda _: None)
        if any(isinstance(layer.style, LossParallel) for layer in own):
            self._until_close.enter_context(loss_parallel())

    def _shard_unit(self, module: TrainingModule, ownership: Ownership) -> None:
        unit = _Unit(module)
        fully_shard(
            unit,
            mesh=self._mesh[tuple(name for name in self._names if name != "tensor")],
            reshard_after_forward=False,
            mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
            ignored_params={
                each for each in module.parameters() if not ownership.is_own(each) or not each.dim()
            },
        )
        self._unit = unit

    def prepare_part(self, part: nn.Sequential) -> None:
        for layer in self._random:
            layer.style._apply(part, self._mesh["tensor"])

    # --- a batch -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _gathered(self, unit: Any) -> Iterator[None]:
        unit.unshard()
        try:
            yield
        finally:
            unit.reshard()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return super().gathered() if self._unit is None else self._gathered(self._unit)

    def end_backward(self, *, synchronize: bool) -> None:
        if self._unit is not None:
            if synchronize:
                self._fill_missing(self._unit)
            self._unit.reduce(self._mesh.device_type, synchronize)
        if synchronize:
            settle(each for _, each in self._own)
            if self._sizes.tensor > 1 and not self._is_checked:
                self._is_checked = True
                check_equal(self._own, self._mesh.get_group("tensor"))

    def _fill_missing(self, unit: "_Unit") -> None:
        """Give zero gradients to parameters that only other replicas have used in a step.

        FSDP reduces the gradients that a process has; all processes must have the same ones.
        """
        sharded = {name for name, each in self._own if each.requires_grad and each.dim()}
        used = [(name, each) for name, each in unit.module.named_parameters() if name in sharded]
        has = torch.tensor([float(each.grad is not None) for _, each in used])
        for (_, each), anywhere in zip(
            used, collectives.all_reduce(has, "max", self._data).tolist(), strict=True
        ):
            if anywhere and each.grad is None:
                each.grad = torch.zeros_like(each)

    # --- gradients -----------------------------------------------------------------------------

    def averaged(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        return [each for each in parameters if self._unit is None or not each.dim()]

    def replicas(self) -> dist.ProcessGroup | None:
        return self._data

    def counted(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def counts_here(self, parameter: Tensor) -> bool:
        if dtensors.is_sharded(parameter):
            return dtensors.is_first_copy(parameter)
        return self._processes.replica == 0

    def close(self) -> None:
        self._until_close.close()
        if self._unit is not None:
            drop_groups(self._unit)
        self._unit, self._data = None, None
        groups.close(self._mesh)


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
