"""Plugins of older trainers that mean a strategy of FairScale."""

from typing import ClassVar

from ...arguments.plugin import Plugin


class DDPShardedPlugin(Plugin):
    """Older spelling of ``strategy="ddp_sharded"``, with its options."""

    strategy: ClassVar[str] = "ddp_sharded"


class DDPSpawnShardedPlugin(Plugin):
    """Older spelling of ``strategy="ddp_sharded_spawn"``, with its options."""

    strategy: ClassVar[str] = "ddp_sharded_spawn"
