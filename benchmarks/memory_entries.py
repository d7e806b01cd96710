"""The strategies whose memory is measured, what theory says of each, and what is to be reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A strategy as it is measured.

    Args:
        name: in the report.
        sharded: which of parameters, gradients and optimizer state are sharded over the ranks.
        script: MiB above the base that a plain script took on four ranks, for a model of as
            many parameters: after a step, and at most; ``None``: none was written. FSDP2's still
            held its gradients after a step.
        strategy: as the trainer knows it; by default its name.
        options: of the strategy.
        imports: loaded before anything is read: an engine's code is not its memory of a model.
        optimizer_bytes: of optimizer state a parameter: Adam's two numbers, and an engine's copy.
    """

    name: str
    sharded: tuple[bool, bool, bool]
    script: tuple[float, float] | None
    strategy: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    optimizer_bytes: int = 8

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the trainer."""
        return {"strategy": self.strategy or self.name, "strategy_options": self.options}

    @property
    def job(self) -> dict[str, Any]:
        """For memory_one.py."""
        return {
            "strategy": self.strategy or self.name,
            "options": self.options,
            "imports": self.imports,
        }

    def theory(self, parameters: int, ranks: int) -> dict[str, float]:
        """MiB of parameters, gradients and optimizer state on a rank."""
        sizes = {"parameters": 4, "gradients": 4, "optimizer": self.optimizer_bytes}
        return {
            kind: size * parameters / (ranks if sharded else 1) / 2**20
            for (kind, size), sharded in zip(sizes.items(), self.sharded, strict=True)
        }


# The engines' code is loaded before.
FAIRSCALE = ("fairscale.nn", "fairscale.optim")
DEEPSPEED = ("deepspeed",)
# In fp32 too DeepSpeed steps a copy of the parameters.
MASTER_COPY = 12

SHARD_NONE, SHARD_ALL = (False, False, False), (True, True, True)
SHARD_OPTIMIZER, SHARD_GRADIENTS = (False, False, True), (False, True, True)

ENTRIES = (
    Entry("ddp", SHARD_NONE, (1542, 1590)),
    Entry("ddp_zero1", SHARD_OPTIMIZER, (965, 1013)),
    Entry("ddp_sharded", SHARD_GRADIENTS, (725, 900), imports=FAIRSCALE),
    Entry(
        "deepspeed_stage_1",
        SHARD_OPTIMIZER,
        (724, 1142),
        imports=DEEPSPEED,
        optimizer_bytes=MASTER_COPY,
    ),
    Entry(
        "deepspeed_stage_2",
        SHARD_GRADIENTS,
        (724, 1107),
        imports=DEEPSPEED,
        optimizer_bytes=MASTER_COPY,
    ),
    Entry(
        "deepspeed_stage_3",
        SHARD_ALL,
        (535, 1001),
        imports=DEEPSPEED,
        optimizer_bytes=MASTER_COPY,
    ),
    Entry("fsdp", SHARD_ALL, (394, 454), imports=("torch.distributed.fsdp",)),
)
