"""The process groups of a mesh, and of the metrics of its ranks."""

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


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

    Args:
        sizes: Sizes of the dimensions by name, outermost first. There is one mesh for each so many
            neighboring ranks: the processes of a pipeline's stage, or all.
        device_type: Type of the ranks' devices.
        timeout: Timeout of collectives.
    """
    ranks = torch.arange(dist.get_world_size()).view(-1, *sizes.values())
    own = ranks[dist.get_rank() // ranks[0].numel()]
    groups = [
        new_group(size, stride, timeout)
        for size, stride in zip(own.shape, own.stride(), strict=True)
    ]
    return DeviceMesh.from_group(groups, device_type, own, mesh_dim_names=tuple(sizes))


def close(mesh: DeviceMesh) -> None:
    """Drop a mesh's references to its groups, and so gloo's threads."""
    getattr(mesh, "_pg_registry", {}).clear()


@contextlib.contextmanager
def counted_once(module: nn.Module, tensor: int, timeout: datetime.timedelta) -> Iterator[None]:
    """Make torchmetrics reduce over one rank of each tensor group, whose ranks see the same.

    Args:
        module: The user's module. Metrics with a process group of their own keep it.
        tensor: Number of ranks of a tensor group.
        timeout: Timeout of collectives.
    """
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
