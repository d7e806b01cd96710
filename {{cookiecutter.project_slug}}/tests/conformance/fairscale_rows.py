"""FairScale's rows of the conformance matrix."""

from .rows import NO_SPARSE, NOT_FOUND, ONE_OPTIMIZER, Launch, Portable, Row, more

LAUNCHES = (Launch(2, engine="fairscale"), more(4, engine="fairscale"))
SLOWLY = (Launch(2, engine="fairscale", slow=True), LAUNCHES[1])

ROWS = {
    "ddp_sharded": Row(LAUNCHES, refused=NO_SPARSE),
    "ddp_sharded, fp16": Row(
        SLOWLY[:1],
        "ddp_sharded",
        {"reduce_fp16": True},
        # As with DDP's hook.
        dict.fromkeys(ONE_OPTIMIZER, 2e-3),
        only=ONE_OPTIMIZER,
    ),
    "ddp_sharded_spawn": Row(
        SLOWLY,
        # As ddp_sharded, in processes whose start takes seconds.
        only=("sgd", "two optimizers", "bf16"),
    ),
    "fairscale_fsdp": Row(
        SLOWLY,
        refused={
            **NO_SPARSE,
            **NOT_FOUND,
            "manual": "FairScale gathers parameters for one forward and one backward",
            **dict.fromkeys(("bf16 true", "fp16 true"), "parameters are sharded in float32"),
        },
    ),
    "fairscale_fsdp, units": Row(
        LAUNCHES[1:],
        "fairscale_fsdp",
        {"min_num_params": 1},
        only=(*ONE_OPTIMIZER, "two optimizers", "batchnorm", "sync batchnorm", "bf16", "fp16"),
    ),
}
_PORTABLE = Portable(*(Launch(devices, engine="fairscale") for devices in (2, 4)))
PORTABLE = {"ddp_sharded": _PORTABLE, "fairscale_fsdp": _PORTABLE}
