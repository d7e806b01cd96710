"""``hsdp``: fsdp inside a node, replicated across nodes.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UserError
from .fsdp import FSDP


class HSDP(FSDP):
    """``fsdp`` inside a node, replicated across nodes.

    Args:
        shard_size: Number of processes over which parameters are sharded; default: those of a
            node.
        options: As in :class:`FSDP`.
    """

    def __init__(self, shard_size: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.shard_size = shard_size

    def make_mesh(self) -> DeviceMesh:
        """The mesh (replicas, shards); neighboring ranks hold the shards of one replica."""
        world = self.layout.world_size
        size = self.shard_size or self.layout.local_world_size
        if world % size:
            raise UserError(
                f"strategy_options.shard_size={size}: {world} processes are not divisible by it"
            )
        ranks = torch.arange(world).view(world // size, size)
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        copies, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
        parts, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
        return DeviceMesh.from_group(
            [copies, parts], self.device.type, ranks, mesh_dim_names=("replicate", "shard")
        )
