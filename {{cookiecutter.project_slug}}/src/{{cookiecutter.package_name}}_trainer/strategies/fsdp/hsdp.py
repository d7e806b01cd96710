"""``hsdp``: parameters sharded over the processes of a node, and replicated across nodes."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ...errors import UserError
from ..memory import Memory, Sizes
from .fsdp import FSDP


class HSDP(FSDP):
    """``fsdp`` inside a node, replicated across nodes.

    Args:
        shard_size: Number of processes that share parameters; default: those of a node.
        options: As in :class:`FSDP`.
    """

    def __init__(self, shard_size: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.shard_size = shard_size

    def memory(self, sizes: Sizes) -> Memory:
        return self.sharded_memory(sizes, self.shard_size or sizes.devices)

    def make_mesh(self) -> DeviceMesh:
        """The mesh (replicas, shards); neighboring ranks hold the shards of one replica."""
        world = self.layout.world_size
        size = self.shard_size or self.layout.local_world_size
        if world % size:
            problem = f"{world} processes are not divisible by it"
            raise UserError(f"strategy_options.shard_size={size}: {problem}")
        return self.new_mesh({"replicate": world // size, "shard": size})
