"""Rows of DeepSpeed's stages."""

from .rows import NO_SPARSE, NOT_FOUND, ONE_OPTIMIZER, Engine, Launch, Portable, Row, more

ENGINE = Engine(
    "deepspeed",
    # The second imports TorchInductor, which an engine would do when it is created.
    imports=("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer"),
    variables={"DS_ACCELERATOR": "cpu"},
)
DEEPSPEED = (Launch(2, engine="deepspeed"), more(4, engine="deepspeed"))
DEEPSPEED_SLOWLY = (Launch(2, engine="deepspeed", slow=True), DEEPSPEED[1])
DEEPSPEED_REFUSES = {
    **NO_SPARSE,
    **NOT_FOUND,
    "two optimizers": "DeepSpeed steps one optimizer with one scheduler",
    "manual": "its engine runs one backward and one step at a time",
    **dict.fromkeys(("bf16 true", "fp16 true"), "steps parameters in float32"),
}
OFFLOADED = ("sgd", "adam", "accumulation", "clip norm", "clip value", "bf16", "fp16")

ROWS = {
    "deepspeed": Row(
        DEEPSPEED_SLOWLY[:1],
        refused=DEEPSPEED_REFUSES,
        only=("sgd", "two optimizers"),
        is_alias=True,
    ),
    "deepspeed, stage 0": Row(
        DEEPSPEED_SLOWLY, "deepspeed", {"stage": 0}, only=ONE_OPTIMIZER, weekly=True
    ),
    "deepspeed_stage_1": Row(DEEPSPEED_SLOWLY, refused=DEEPSPEED_REFUSES, weekly=True),
    "deepspeed_stage_2": Row(DEEPSPEED, refused=DEEPSPEED_REFUSES),
    "deepspeed_stage_3": Row(
        DEEPSPEED_SLOWLY,
        refused={**DEEPSPEED_REFUSES, "averaged": "its engine gathers and frees parameters"},
    ),
    "deepspeed_stage_2_offload": Row(DEEPSPEED_SLOWLY, only=(*OFFLOADED, "averaged"), weekly=True),
    "deepspeed_stage_3_offload": Row(DEEPSPEED_SLOWLY, only=OFFLOADED),
}

_PORTABLE = Portable(*(Launch(devices, engine="deepspeed") for devices in (2, 4)))
PORTABLE = dict.fromkeys(("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"), _PORTABLE)
