"""What strategies on a mesh share: its process groups, and DTensors in steps."""

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random, debug
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ....checkpoint import dtensors
from ....errors import UserError
from ....launch import collectives
from ...base import DataLayout, Stage, Strategy
from ...fsdp.state import groups_split
from .plan import Layer
from .sizes import Sizes
from .styles import LossParallel

# Relative difference of the norms of two gradients that should be equal; not 0: a kernel of a GPU
# may sum in any order.
_TOLERANCE = 1e-2


def new_group(size: int, stride: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Create groups of so many ranks, each a stride above the one before; return this process'."""
    ranks = torch.arange(dist.get_world_size()).view(-1, size, stride)
    lines = ranks.movedim(1, -1).reshape(-1, size).tolist()
    group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
    own: dist.ProcessGroup = group
    return own


def device_mesh(
    sizes: Mapping[str, int], device_type: str, timeout: datetime.timedelta
) -> DeviceMesh:
    """Create the groups of all dimensions, and return the mesh that contains this process.

    The dimensions are outermost first. There is one mesh for each so many neighboring ranks: the
    processes of a pipeline's stage, or all.
    """
    ranks = torch.arange(dist.get_world_size()).view(-1, *sizes.values())
    own = ranks[dist.get_rank() // ranks[0].numel()]
    groups = [
        new_group(size, stride, timeout)
        for size, stride in zip(own.shape, own.stride(), strict=True)
    ]
    return DeviceMesh.from_group(groups, device_type, own, mesh_dim_names=tuple(sizes))


def drop_mesh(mesh: DeviceMesh) -> None:
    """Drop a mesh's references to its groups, and so gloo's threads.

    torch's caches keep meshes, too: the next fit would use the groups of an equal one of this fit.
    """
    getattr(mesh, "_pg_registry", {}).clear()
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


@contextlib.contextmanager
def counted_once(module: nn.Module, tensor: int, timeout: datetime.timedelta) -> Iterator[None]:
    """Make torchmetrics reduce over one of the ``tensor`` ranks of each tensor group."""
    metrics: list[Any] = [
        each
        for each in module.modules()
        if hasattr(each, "metric_state") and getattr(each, "process_group", module) is None
    ]
    if metrics:
        group = new_group(dist.get_world_size() // tensor, tensor, timeout)
        for each in metrics:
            each.process_group = group
    try:
        yield
    finally:
        for each in metrics:
            each.process_group = None


class OnMesh(Strategy):
    """Base class of meshes.

    Neighboring ranks form a tensor group, and these a context group; a pipeline is outermost.
    """

    sizes: Sizes
    until_teardown: contextlib.ExitStack
    _is_checked = False

    def replicas(self, devices: int, nodes: int) -> int:
        self.sizes = self.sizes.on(devices * nodes)
        return self.sizes.replicas

    @property
    def data(self) -> DataLayout:
        rank, sizes = self._layout.rank, self.sizes
        return replace(
            super().data,
            replicas=sizes.replicas,
            index=rank // sizes.tensor % sizes.replicas,
            is_first=rank % sizes.tensor == 0,
            random_rank=rank - rank % sizes.tensor,
        )

    def prepare_dtensors(self, layers: Iterable[Layer], mesh: DeviceMesh) -> None:
        """Prepare what DTensors of a tensor group do in steps: draw, and compute losses."""
        if mesh.device_type != "cpu":  # which has no tracker
            # Generators are equal within a tensor group. By default, torch's first random operation
            # of a DTensor broadcasts rank 0's: to other replicas, and to stages that draw nothing.
            self.until_teardown.callback(setattr, _random, "_rng_tracker", _random._rng_tracker)
            _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
        if any(isinstance(layer.style, LossParallel) for layer in layers):
            self.until_teardown.enter_context(loss_parallel())

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        outputs = super().forward(stage, batch, batch_idx)
        return tree_map(dtensors.whole, outputs) if stage == "predict" else outputs

    def _read_loss(self, outputs: Any) -> Tensor:
        loss: Tensor = dtensors.whole(super()._read_loss(outputs))
        return loss

    def complete_gradients(self, named: Iterable[tuple[str, Any]], mesh: DeviceMesh) -> None:
        """Sum this process' gradients that are still partial sums on the ranks of a tensor group.

        Raises:
            UserError: In the first step: ranks of a tensor group have different gradients of a
                parameter that all hold. Its activations are sharded, and its style does not say so.
        """
        held: dict[str, Tensor] = {}
        for name, each in named:
            if dtensors.is_sharded(each.grad) and each.grad.placements != each.placements:
                each.grad = each.grad.redistribute(placements=each.placements)
            of_each = getattr(each, "device_mesh", None)
            if of_each is None or "tensor" not in of_each.mesh_dim_names:
                held[name] = torch.zeros(()) if each.grad is None else dtensors.local(each.grad)
        if self._is_checked or self.sizes.tensor == 1 or not held:
            return
        self._is_checked, group = True, mesh.get_group("tensor")
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in held.values()]
        own = torch.stack([each.cpu() for each in norms])
        largest = collectives.all_reduce(own, "max", group)
        differ = largest - collectives.all_reduce(own, "min", group) > _TOLERANCE * largest
        found = [name for name, is_other in zip(held, differ.tolist(), strict=True) if is_other]
        if found:
            rest = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise UserError(
                f"the gradients of {found[0]} differ on the ranks of a tensor group: "
                "parallelize_plan shards activations where it is used; give its module a style, "
                "such as SequenceParallel(), or replicate its input and output. If they differ by "
                "dropout, give the module that draws it ShardedRandomness() only where activations "
                f"are sharded{rest}"
            )

    def _step_optimizer(self, optimizer: Optimizer) -> None:
        with groups_split(optimizer):
            super()._step_optimizer(optimizer)

    def teardown(self) -> None:
        self.until_teardown.close()
        super().teardown()
