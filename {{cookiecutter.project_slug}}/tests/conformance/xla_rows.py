"""Rows of PyTorch/XLA on its CPU device, tried only in its own environment: `make test-xla`."""

import importlib.util

from .rows import NO_SPARSE, QUICKLY, Engine, Launch, Portable, Row

ENGINE = Engine("xla")
HERE = importlib.util.find_spec("torch_xla") is not None
REFUSED = {
    **NO_SPARSE,
    **dict.fromkeys(("fp16", "fp16 true"), "have no float16"),
    "averaged": "averages were not tried",
}
# Not those whose shapes depend on the data: XLA would compile each step again, for minutes.
ONLY = (*QUICKLY[:6], "manual", "uneven", "clip value", "sync batchnorm", "bf16 true", *REFUSED)
LAUNCHES = (Launch(1, only=QUICKLY), Launch(2), Launch(4, only=QUICKLY)) if HERE else ()
ROWS = {"xla": Row(LAUNCHES, refused=REFUSED, only=ONLY)}
# Other strategies need a newer torch than there is for PyTorch/XLA.
PORTABLE = {"xla": Portable(partners=("single_device", "ddp"))} if HERE else {}
