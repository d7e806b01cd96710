"""``ddp_fork`` and ``ddp_notebook``: ddp whose processes are forked from this one.

Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
"""

from typing import ClassVar, Literal

from ..limits import Limits
from .ddp import DDP


class DDPFork(DDP):
    """``ddp`` in processes that are forked for one call, in a notebook or a script.

    Nothing is pickled, and what a cell has defined is available.

    After ``fit`` the weights and metrics are back in the process that called it. CUDA must not be
    initialized in it before. On CPUs each process computes on one thread.
    """

    limits: Limits = Limits(max_nodes=1)
    launcher: ClassVar[Literal["subprocess", "spawn", "fork"]] = "fork"
