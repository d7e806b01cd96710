"""Rows of Horovod, which starts its processes itself."""

import sys
from pathlib import Path

from ..project import mpirun
from .rows import ONE_OPTIMIZER, Engine, Launch, Portable, Row, more

ENGINE = Engine("horovod")


def horovodrun(processes: int) -> list[str]:
    """The command that starts processes of Horovod on this machine, over gloo."""
    script = Path(sys.executable).with_name("horovodrun")
    return [str(script), "-np", str(processes), "--gloo"]


ROWS = {
    "horovod": Row(
        (Launch(2, by=horovodrun, engine="horovod"), more(3, by=horovodrun, engine="horovod")),
        options={"scale_learning_rate": False},
        refused={
            **dict.fromkeys(("manual", "sparse, manual"), "optimizers need one backward per step"),
            "bf16": "do not support bfloat16",
            "bf16 true": "do not support bfloat16",
        },
    ),
    "horovod, mpirun": Row(
        (Launch(2, by=mpirun, engine="horovod", slow=True),),
        "horovod",
        {"scale_learning_rate": False},
        only=ONE_OPTIMIZER,
        weekly=True,
    ),
}

PORTABLE = {
    "horovod": Portable(*(Launch(devices, by=horovodrun, engine="horovod") for devices in (2, 3)))
}
