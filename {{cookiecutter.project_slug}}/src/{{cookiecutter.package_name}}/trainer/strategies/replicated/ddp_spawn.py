"""``ddp_spawn``: ddp whose processes are spawned from this one.

Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
"""

from typing import ClassVar, Literal

from ..limits import Limits
from .ddp import DDP


class DDPSpawn(DDP):
    """``ddp`` in processes that are spawned for one call of a script.

    The module, data and trainer are pickled.

    After ``fit`` the weights and metrics are back in the process that called it.
    """

    limits: Limits = Limits(max_nodes=1)
    launcher: ClassVar[Literal["subprocess", "spawn", "fork"]] = "spawn"
