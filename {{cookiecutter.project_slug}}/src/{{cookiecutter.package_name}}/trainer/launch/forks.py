"""Keeps a forked process, such as a loader's worker, from destroying what its parent has left over.

What an earlier run has left in a reference cycle (a process group, tensors of a GPU) is destroyed
whenever Python's garbage collector comes by. In a forked process that may hang: gloo's destructor
waits for a thread that only the parent has.

Source: https://docs.python.org/3/library/gc.html#gc.freeze
"""

import gc
import os
from functools import cache


@cache
def keep_garbage() -> None:
    """Have each process that is forked from now on never collect what was there before the fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)
