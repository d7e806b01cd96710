"""The process groups of a mesh, and of the metrics of its ranks."""

import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

Lines = list[list[int]]


def new_group(lines: Lines, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Create a group for each list of ranks, and return this process' own."""
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
    groups = [
        new_group(ranks.movedim(dimension, -1).reshape(-1, size).tolist(), timeout)
        for dimension, size in enumerate(sizes.values(), start=1)
    ]
    own = ranks[dist.get_rank() // ranks[0].numel()]
    return DeviceMesh.from_group(groups, device_type, own, mesh_dim_names=tuple(sizes))


def close(mesh: DeviceMesh) -> None:
    """Drop a mesh's references to its groups, and so gloo's threads."""
    getattr(mesh, "_pg_registry", {}).clear()


class CountedOnce:
    """Makes torchmetrics reduce over one rank of each replica, whose ranks see the same samples.

    Args:
        module: The user's module. Metrics with a process group of their own keep it.
        ranks: For each place in a replica, the ranks at this place.
    """

    def __init__(self, module: nn.Module, ranks: Lines) -> None:
        self._changed: list[Any] = [
            each
            for each in module.modules()
            if hasattr(each, "metric_state") and getattr(each, "process_group", self) is None
        ]
        if self._changed:
            group, _ = dist.new_subgroups_by_enumeration(ranks)
            for each in self._changed:
                each.process_group = group

    def close(self) -> None:
        """Undo it, before the process group is destroyed."""
        for each in self._changed:
            each.process_group = None
