"""The FairScale engine. Nothing outside this folder names it."""

from ..registration import Entry, Registration

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
    }
)
