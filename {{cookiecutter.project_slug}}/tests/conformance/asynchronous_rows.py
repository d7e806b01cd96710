"""Rows of the parameter server."""

from .rows import NO_SPARSE, Launch, Portable, Row, more

FAMILY = "asynchronous"

ROWS = {
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
    )
}

PORTABLE = {"parameter_server": Portable()}
