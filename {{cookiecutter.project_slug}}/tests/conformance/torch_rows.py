"""Rows of the strategies that need no package besides torch."""

from .rows import IN_UNITS, NO_SPARSE, ONE_OPTIMIZER, SMALL_UNITS, Launch, Portable, Row, more

TWO_AND_THREE = (Launch(2), more(3))
# For what differs from another row in one thing alone.
SLOWLY = (Launch(2, slow=True), more(3))
# Even and uneven divisions of the subject's parameters need more than two processes.
TWO_AND_FOUR = (Launch(2), more(4))
SLOWLY_ON_FOUR = (Launch(2, slow=True), more(4))
REPLICAS_REFUSE = {
    **dict.fromkeys(("manual", "sparse, manual"), "training_step runs once per replica"),
    "sync batchnorm": "a replica normalizes with its own part of the batch",
}

ROWS = {
    "single_device": Row((Launch(1),)),
    "dp": Row(
        TWO_AND_THREE,
        refused={**REPLICAS_REFUSE, "fp16": "gradient scaling with replicas"},
        reads_by_node=True,
    ),
    "ddp": Row(TWO_AND_THREE),
    "ddp, unused parameters": Row(
        SLOWLY, "ddp", {"find_unused_parameters": True}, only=ONE_OPTIMIZER, weekly=True
    ),
    "ddp, fp16 hook": Row(
        SLOWLY,
        "ddp",
        {"communication_hook": "fp16"},
        # Gradients lose what is below 2^-11 of them, in each of ten steps.
        dict.fromkeys(ONE_OPTIMIZER, 2e-3),
        only=ONE_OPTIMIZER,
    ),
    "ddp, bf16 hook": Row(
        SLOWLY,
        "ddp",
        {"communication_hook": "bf16"},
        dict.fromkeys(ONE_OPTIMIZER, 2e-2),
        only=ONE_OPTIMIZER,
        weekly=True,
    ),
    "ddp, PowerSGD": Row(
        SLOWLY,
        "ddp",
        {"communication_hook": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 3},
        # Two columns stand for a gradient; what is left out comes a step later.
        dict.fromkeys(ONE_OPTIMIZER, 0.2),
        only=ONE_OPTIMIZER,
    ),
    # As ddp, and each of their runs starts processes of its own, which takes seconds.
    "ddp_spawn": Row(SLOWLY, only=("sgd", "two optimizers", "bf16"), is_alias=True),
    "ddp_fork": Row(TWO_AND_THREE, only=("sgd", "two optimizers", "bf16"), is_alias=True),
    "ddp_notebook": Row((Launch(2),), only=("sgd",), is_alias=True),
    "ddp2": Row(
        (Launch(2, slow=True), more(3), Launch(2, nodes=2)),
        refused=REPLICAS_REFUSE,
        reads_by_node=True,
    ),
    "ddp_zero1": Row(TWO_AND_THREE),
    "fsdp": Row(TWO_AND_FOUR, options=SMALL_UNITS, tolerances=IN_UNITS, refused=NO_SPARSE),
    "fsdp, offload": Row(
        SLOWLY_ON_FOUR,
        "fsdp",
        {**SMALL_UNITS, "offload": True},
        IN_UNITS,
        only=(
            *(*ONE_OPTIMIZER, "clip value", "two optimizers", "manual", "averaged"),
            *("experts", "bf16"),
        ),
    ),
    "fsdp, float32 units": Row(
        SLOWLY_ON_FOUR, "fsdp", {**SMALL_UNITS, "parameter_dtype": "float32"}, only=("bf16",)
    ),
    "fsdp, whole gradients": Row(
        SLOWLY_ON_FOUR,
        "fsdp",
        {**SMALL_UNITS, "reduce_every_microbatch": False, "reshard_after_forward": False},
        only=(*ONE_OPTIMIZER, "experts, clipped"),
        weekly=True,
    ),
    "hsdp": Row(
        SLOWLY_ON_FOUR,
        options={**SMALL_UNITS, "shard_size": 2},
        tolerances=IN_UNITS,
        refused=NO_SPARSE,
    ),
}

# Those that keep parameters or states in a form of their own; the others are made of these.
PORTABLE = {
    "single_device": Portable(Launch(1), Launch(1)),
    "dp": Portable(),
    "ddp": Portable(),
    "ddp_zero1": Portable(),
    "fsdp": Portable(),
    "hsdp": Portable(Launch(4), Launch(2)),
}
