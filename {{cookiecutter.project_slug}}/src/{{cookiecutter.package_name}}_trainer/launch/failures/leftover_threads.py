"""End a process whose work is done although a non-daemon thread of the program still runs.

Python waits for every non-daemon thread before it exits. A thread that never ends would keep the
rank alive, and with it the launcher of all ranks.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

SECONDS = "TRAINER_EXIT_SECONDS"
_DEFAULT_SECONDS = 5.0
_POLL_SECONDS = 0.2


class _Watch:
    """The thread that ends this process; one per process."""

    def __init__(self) -> None:
        self.code = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        # A forked process has the object, but not the thread.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="leftover-threads", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        # Python's main thread object stays alive until the program has ended.
        while threading.main_thread().is_alive():
            time.sleep(_POLL_SECONDS)
        deadline = time.monotonic() + float(os.environ.get(SECONDS) or _DEFAULT_SECONDS)
        while left := _running_threads():
            if time.monotonic() > deadline:
                self._end(left)
            time.sleep(_POLL_SECONDS)

    def _end(self, left: list[str]) -> None:
        code = self.code or int(getattr(sys, "last_value", None) is not None)
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        _print(
            f"{rank}note: ended though threads of the program are still running: "
            f"{', '.join(left)}; end them, or start them with daemon=True"
        )
        end_now(code)


_watch = _Watch()


def end_with_main_thread(code: int | None = None) -> None:
    """End this process a few seconds after its main thread.

    Args:
        code: The exit code; default: the last one given, or 1 after an uncaught error.
    """
    if code is not None:
        _watch.code = code
    _watch.start()


def end_now(code: int) -> NoReturn:
    """End this process now: only atexit handlers run, for a few seconds at most.

    Args:
        code: The exit code.
    """
    _call_with_timeout(_DEFAULT_SECONDS, atexit._run_exitfuncs)
    with contextlib.suppress(OSError, ValueError):  # closed, or the terminal is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _running_threads() -> list[str]:
    main = threading.main_thread()
    return [each.name for each in threading.enumerate() if each is not main and not each.daemon]


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _call_with_timeout(seconds: float, call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
