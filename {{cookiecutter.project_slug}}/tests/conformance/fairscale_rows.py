"""Rows of FairScale's strategies."""

from .rows import NO_SPARSE, Engine, Launch, Portable, Row, more

ENGINE = Engine("fairscale", imports=("fairscale.nn.data_parallel", "fairscale.optim"))
FAIRSCALE = (Launch(2, engine="fairscale"), more(4, engine="fairscale"))
FAIRSCALE_SLOWLY = (Launch(2, engine="fairscale", slow=True), FAIRSCALE[1])

ROWS = {
    "ddp_sharded": Row(FAIRSCALE, refused=NO_SPARSE),
    "ddp_sharded_spawn": Row(
        FAIRSCALE_SLOWLY,
        # As ddp_sharded, in processes whose start takes seconds.
        only=("sgd", "two optimizers", "bf16"),
        is_alias=True,
    ),
}

PORTABLE = {"ddp_sharded": Portable(*(Launch(devices, engine="fairscale") for devices in (2, 4)))}
