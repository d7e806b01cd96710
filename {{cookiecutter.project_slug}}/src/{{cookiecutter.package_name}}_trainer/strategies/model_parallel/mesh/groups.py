"""The process groups of a mesh: of its dimensions, and of metrics."""

import contextlib
import datetime
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug


def _new_group(size: int, stride: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Create groups of so many ranks, each a stride above the one before; return this process'."""
    ranks = torch.arange(dist.get_world_size()).view(-1, size, stride)
    lines = ranks.movedim(1, -1).reshape(-1, size).tolist()
    group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timeout)
    own: dist.ProcessGroup = group
    return own


def device_mesh(
    sizes: Mapping[str, int], device_type: str, timeout: datetime.timedelta
) -> DeviceMesh:
    """Create the groups of all dimensions, outermost first, and the mesh of all ranks."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = [
        _new_group(size, stride, timeout)
        for size, stride in zip(ranks.shape, ranks.stride(), strict=True)
    ]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(sizes))


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
        group = _new_group(dist.get_world_size() // tensor, tensor, timeout)
        for each in metrics:
            each.process_group = group
    try:
        yield
    finally:
        for each in metrics:
            each.process_group = None
