"""Rows of FairScale's strategies."""

from .rows import (
    NO_SPARSE,
    NOT_FOUND,
    ONE_OPTIMIZER,
    Engine,
    Launch,
    Portable,
    Row,
    more,
)

ENGINE = Engine("fairscale", imports=("fairscale.nn.data_parallel", "fairscale.optim"))
FAIRSCALE = (Launch(2, engine="fairscale"), more(4, engine="fairscale"))
FAIRSCALE_SLOWLY = (Launch(2, engine="fairscale", slow=True), FAIRSCALE[1])

ROWS = {
    "ddp_sharded": Row(FAIRSCALE, refused=NO_SPARSE),
    "ddp_sharded, fp16": Row(
        FAIRSCALE_SLOWLY[:1],
        "ddp_sharded",
        {"reduce_fp16": True},
        # As with DDP's hook.
        dict.fromkeys(ONE_OPTIMIZER, 2e-3),
        only=ONE_OPTIMIZER,
    ),
    "ddp_sharded_spawn": Row(
        FAIRSCALE_SLOWLY,
        # As ddp_sharded, in processes whose start takes seconds.
        only=("sgd", "two optimizers", "bf16"),
        is_alias=True,
    ),
    "fairscale_fsdp": Row(
        FAIRSCALE_SLOWLY,
        refused={
            **NO_SPARSE,
            **NOT_FOUND,
            "manual": "FairScale gathers parameters for one forward and one backward",
            **dict.fromkeys(("bf16 true", "fp16 true"), "parameters are sharded in float32"),
        },
    ),
    "fairscale_fsdp, units": Row(
        FAIRSCALE[1:],
        "fairscale_fsdp",
        {"min_num_params": 1},
        only=(*ONE_OPTIMIZER, "two optimizers", "batchnorm", "sync batchnorm", "bf16", "fp16"),
    ),
}

_PORTABLE = Portable(*(Launch(devices, engine="fairscale") for devices in (2, 4)))
PORTABLE = {"ddp_sharded": _PORTABLE, "fairscale_fsdp": _PORTABLE}
