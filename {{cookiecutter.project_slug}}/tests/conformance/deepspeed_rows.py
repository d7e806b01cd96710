"""DeepSpeed's rows of the conformance matrix."""

from .rows import NO_SPARSE, NOT_FOUND, ONE_OPTIMIZER, Launch, Portable, Row, more

LAUNCHES = (Launch(2, engine="deepspeed"), more(4, engine="deepspeed"))
SLOWLY = (Launch(2, engine="deepspeed", slow=True), LAUNCHES[1])
REFUSED = {
    **NO_SPARSE,
    **NOT_FOUND,
    "two optimizers": "DeepSpeed steps one optimizer with one scheduler",
    "manual": "its engine runs one backward and one step at a time",
    **dict.fromkeys(("bf16 true", "fp16 true"), "steps parameters in float32"),
}
OFFLOADED = ("sgd", "adam", "accumulation", "clip norm", "clip value", "bf16", "fp16")

ROWS = {
    "deepspeed": Row(SLOWLY[:1], refused=REFUSED, only=("sgd", "two optimizers")),
    "deepspeed, stage 0": Row(SLOWLY, "deepspeed", {"stage": 0}, only=ONE_OPTIMIZER),
    "deepspeed_stage_1": Row(SLOWLY, refused=REFUSED),
    "deepspeed_stage_2": Row(LAUNCHES, refused=REFUSED),
    "deepspeed_stage_3": Row(SLOWLY, refused=REFUSED),
    "deepspeed_stage_2_offload": Row(SLOWLY, only=OFFLOADED),
    "deepspeed_stage_3_offload": Row(SLOWLY, only=OFFLOADED),
}
_PORTABLE = Portable(*(Launch(devices, engine="deepspeed") for devices in (2, 4)))
PORTABLE = {
    "deepspeed_stage_1": _PORTABLE,
    "deepspeed_stage_2": _PORTABLE,
    "deepspeed_stage_3": _PORTABLE,
}
