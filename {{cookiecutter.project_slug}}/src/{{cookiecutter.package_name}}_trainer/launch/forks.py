"""Keep forked processes, such as DataLoader workers, from destroying objects of their parent.

Objects of an earlier run in a reference cycle (a process group, GPU tensors) are destroyed when
Python's garbage collector runs. In a forked process that may hang: gloo's destructor waits for a
thread that exists only in the parent.

Source: https://docs.python.org/3/library/gc.html#gc.freeze
"""

import gc
import os
from functools import cache


@cache
def freeze_garbage_in_children() -> None:
    """Exclude existing objects from garbage collection in all processes forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)
