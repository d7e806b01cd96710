"""Forks of a process that has threads: what would hang in a child, such as a loader's worker."""

import contextlib
import functools
import gc
import os
import sys
import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
# How threads that torch has started itself are named.
_OF_TORCH = "(pt_"
_MOST_SECONDS = 1.0
_POLL_SECONDS = 0.0005


@functools.cache  # once in a process
def keep_children_from_hanging() -> None:
    """Have each fork of this process from now on take care of two ways in which its child hangs.

    - To destroy an earlier run's process group, if it is in a reference cycle, a child waits for a
      thread of gloo, which exists only in the parent: children do not collect what they inherit.
    - Up to Python 3.11.9, a child waits for a lock of the interpreter that a thread has at the
      fork, for example one of gloo that frees a tensor (https://github.com/python/cpython/issues/
      112275): the fork waits until torch's threads are idle.
    """
    os.register_at_fork(after_in_child=gc.freeze)
    if sys.version_info < (3, 11, 10):
        os.register_at_fork(before=_wait_for_threads)


def _wait_for_threads() -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    while _is_any_running() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _is_any_running() -> bool:
    """Whether a thread of torch runs, other than this one; False where there is no ``/proc``."""
    own = str(threading.get_native_id())
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has ended
                name, _, rest = (task / "stat").read_text().rpartition(")")
                if _OF_TORCH in name and task.name != own and rest.split()[0] != "S":
                    return True
    return False
