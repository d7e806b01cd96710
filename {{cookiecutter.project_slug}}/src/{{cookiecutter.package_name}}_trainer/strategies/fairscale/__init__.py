"""The FairScale engine. No file outside this folder names it; deleting the folder removes it.

It imports from ``strategies/``, ``gradients/`` and ``replicated/``, and from the floors below.
"""

from ..registration import Entry, Registration

_FSDP = "is FairScale's FSDP; use strategy='fairscale_fsdp', or PyTorch's own: 'fsdp'"

REGISTRATION = Registration(
    {
        "ddp_sharded": Entry("sharded:DDPSharded"),
        "ddp_sharded_spawn": Entry(
            "sharded:DDPSharded",
            "ddp_sharded in processes that are spawned for one call of a script",
            launcher="spawn",
            max_nodes=1,
        ),
        "fairscale_fsdp": Entry("fsdp:FairScaleFSDP"),
    },
    other_names={
        **dict.fromkeys(
            ("sequential_fairscale", "fairscale_pipe"),
            "was FairScale's Pipe; use strategy='sequential'",
        ),
        **dict.fromkeys(("ddp_fully_sharded", "fully_sharded", "fsdp_fairscale"), _FSDP),
        **{
            f"{name}_find_unused_parameters_false": f"is strategy={name!r} here, which asks for no "
            "unused parameters"
            for name in ("ddp_sharded", "ddp_sharded_spawn")
        },
    },
    spawned_plugins=dict.fromkeys(("ddp_sharded", "ddp_sharded_spawn"), "ddp_sharded_spawn"),
    plugins={
        "DDPShardedPlugin": "plugins:DDPShardedPlugin",
        "DDPSpawnShardedPlugin": "plugins:DDPSpawnShardedPlugin",
    },
)
