"""Parameters on several meshes in one model: plain ones, and DTensors.

torch's operations on lists of tensors (foreach and fused optimizers) need all of them on one mesh.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ....checkpoint import dtensors
from ....errors import UserError
from ....launch import collectives
from ...base import DataLayout, Stage, Strategy
from ...fsdp.state import groups_split
from .sizes import Sizes

# Relative difference of the norms of two gradients that should be equal.
_TOLERANCE = 1e-2


def settle(parameters: Iterable[Tensor]) -> None:
    """Sum the gradients that are still partial sums on the ranks of a tensor group."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        placements = getattr(parameter, "placements", None)
        if dtensors.is_sharded(gradient) and gradient.placements != placements:
            parameter.grad = gradient.redistribute(placements=placements)


def check_equal(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Check that the ranks of a tensor group have the same gradients of parameters that all hold.

    They differ if activations are sharded where the parameter is used, and its style does not say
    so: then each rank has only a part of the gradient.

    Args:
        named: All parameters, by name.
        group: The tensor group.

    Raises:
        UserError: They differ; on every rank.
    """
    held = [(name, each) for name, each in named if "tensor" not in _dimensions(each)]
    if not held:
        return
    norms = torch.stack([_norm(each.grad) for _, each in held])
    largest = collectives.all_reduce(norms, "max", group)
    smallest = collectives.all_reduce(norms, "min", group)
    # Not exactly: a kernel of a GPU may sum in any order.
    differ = (largest - smallest > _TOLERANCE * largest).tolist()
    lines = [
        f"the gradients of {name} differ on the ranks of a tensor group: parallelize_plan shards "
        "activations where it is used; give its module a style, such as SequenceParallel(), or "
        "replicate its input and output. If they differ by dropout, give the module that draws it "
        "ShardedRandomness() only where activations are sharded"
        for (name, _), is_different in zip(held, differ, strict=True)
        if is_different
    ]
    if lines:
        rest = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise UserError(lines[0] + rest)


def _dimensions(parameter: Any) -> tuple[str, ...]:
    mesh = getattr(parameter, "device_mesh", None)
    return () if mesh is None else tuple(mesh.mesh_dim_names)


def _norm(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros((), dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(dtensors.local(gradient), dtype=torch.float64)
    return norm.cpu()


class OnMesh(Strategy):
    """What strategies on a mesh share: who reads which part of a batch, and DTensors in steps.

    Neighboring ranks form a tensor group, and these a context group; a pipeline is outermost.
    """

    sizes: Sizes

    def replicas(self, devices: int, nodes: int) -> int:
        self.sizes = self.sizes.on(devices * nodes)
        return self.sizes.replicas

    @property
    def data(self) -> DataLayout:
        rank, sizes = self._layout.rank, self.sizes
        return replace(
            super().data,
            replicas=sizes.replicas,
            index=rank // (sizes.context * sizes.tensor) % sizes.replicas,
            is_first=rank % (sizes.context * sizes.tensor) == 0,
            random_rank=rank - rank % sizes.tensor,
        )

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = super().forward(stage, batch, batch_idx)
        return tree_map(dtensors.whole, outputs) if stage == "predict" else outputs

    def _read_loss(self, outputs: Any) -> Tensor:
        loss: Tensor = dtensors.whole(super()._read_loss(outputs))
        return loss

    def _step_optimizer(self, optimizer: Optimizer) -> None:
        with groups_split(optimizer):
            super()._step_optimizer(optimizer)
