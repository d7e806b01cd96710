"""Rows of local SGD, DiLoCo and the parameter server."""

from .rows import NO_SPARSE, Launch, Portable, Row, more

FAMILY = "asynchronous"
# Parameters that are averaged after each step are one process' if steps are linear in gradients.
LINEAR = ("sgd", "scheduler", "scaled rate", "drop last", "uneven", "accumulation", "batchnorm")
EACH_STEP = {"every_n_steps": 1}
WITHOUT_MOMENTUM = {**EACH_STEP, "outer_momentum": 0.0, "outer_learning_rate": 1.0}

ROWS = {
    "local_sgd": Row((Launch(2), more(3)), options=EACH_STEP, only=(*LINEAR, "bf16", "fp16")),
    "local_sgd, warmup": Row(
        (Launch(2, slow=True), more(3)),
        "local_sgd",
        {"warmup_steps": 99},
        refused={
            "sync batchnorm": "in every forward",
            "averaged": "ranks hold different weights",
        },
    ),
    "diloco": Row((Launch(2, slow=True), more(3)), options=WITHOUT_MOMENTUM, only=LINEAR),
    # Its default is asynchronous, which equals nothing.
    "parameter_server": Row(
        (Launch(2), more(4)),
        options={"max_staleness": 0},
        refused={
            **NO_SPARSE,
            **dict.fromkeys(("manual", "sparse, manual"), "optimizers step on the server"),
            "sync batchnorm": "workers do not run each forward together",
            "averaged": "workers hold weights of different steps",
            "scaled rate": "each gradient is a step of its own",
            "fp16": "a gradient scaler must see",
        },
    ),
}

PORTABLE = {"parameter_server": Portable()}
