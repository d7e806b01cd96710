"""The FairScale engine. No file outside this folder names it; deleting the folder removes it."""

from ..registry import Entry, Registration

_SHARDED = Entry(
    "sharded:DDPSharded", lacks={"reduce_fp16": "use strategy='ddp' with communication_hook='fp16'"}
)
REGISTRATION = Registration(
    {
        "ddp_sharded": _SHARDED,
        "ddp_sharded_spawn": _SHARDED.on_one_node(
            "spawn", "ddp_sharded in processes that are spawned for one call of a script"
        ),
    },
    refused={"fairscale_fsdp": "; use 'fsdp', which is PyTorch's own"},
)
