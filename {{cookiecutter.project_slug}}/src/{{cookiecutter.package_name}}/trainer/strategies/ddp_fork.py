"""``ddp_fork`` and ``ddp_notebook``: ddp whose processes are forked from this one.

Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
"""

from typing import ClassVar, Literal

from .ddp import DDP
from .limits import Limits


class DDPFork(DDP):
    """``ddp`` in processes that are forked for one call, in a notebook or a script.

    Nothing is pickled, and what a cell has defined is available.

    After ``fit`` the weights and metrics are back in the process that called it. CUDA must not be
    initialised in it before. On CPUs each process computes on one thread.
    """

    limits: Limits = Limits(max_nodes=1)
    launcher: ClassVar[Literal["subprocess", "spawn", "fork"]] = "fork"
