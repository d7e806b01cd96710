"""The FairScale engine. No file outside this folder names it; deleting the folder removes it.

It imports from ``strategies/``, ``gradients/`` and ``replicated/``, and from the floors below.
"""

from ..registry import Entry, Registration

REGISTRATION = Registration(
    {
        "ddp_sharded": Entry("sharded:DDPSharded"),
        "ddp_sharded_spawn": Entry(
            "sharded:DDPSharded",
            "ddp_sharded in processes that are spawned for one call of a script",
            launcher="spawn",
            max_nodes=1,
        ),
    },
    refused={"fairscale_fsdp": "; use 'fsdp', which is PyTorch's own"},
)
