"""A run that is told to end saves first: a signal sets a flag, and the ranks agree on it.

Nothing is done inside the signal handler: a collective or a save there would meet the step's own.
"""

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

import torch

from . import collectives

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_SHOW_CURSOR = b"\x1b[?25h"
# About how long a signal waits until all ranks know of it, beside the step that is being made.
_SECONDS = 1.0
_MOST_STEPS = 1000


@contextlib.contextmanager
def children_deaf_to_interrupts(method: str = "fork") -> Iterator[None]:
    """SIGINT (Ctrl-C) does not reach processes that are started meanwhile, and this one later.

    Args:
        method: of multiprocessing, by which they are started.
    """
    if method != "fork":
        # It is started along with the first of them, and would have SIGINT let through again.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hear_interrupts() -> None:
    """Undo :func:`children_deaf_to_interrupts` in a process that was started so."""
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def is_ignored(number: int) -> bool:
    """Whether this process was started to ignore SIGHUP, as by nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def leave_lost_terminal() -> None:
    """Print nowhere if the terminal is gone: each line would be an error, before the save."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if is_device and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class Preempted(SystemExit):
    """The run has saved and ends, as a signal has asked; the exit code is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


class Preemption:
    """Notices the :data:`SIGNALS`, and has all ranks act on one after the same step.

    Ranks agree by one reduction about every second: the number of steps until the next is agreed
    with each, so that fast steps do not pay for it. What is reduced is on the CPU: no rank waits
    for its GPU.
    """

    def __init__(self) -> None:
        self._received = 0
        self._steps = 0
        self._interval = 1
        self._since = time.monotonic()

    @contextlib.contextmanager
    def noticing(self) -> Iterator[None]:
        """Only note the signals for a while; a handler that the program has set is left alone.

        A second SIGINT (Ctrl-C) ends the process at once; in an interactive session it raises
        KeyboardInterrupt. A signal that the ranks have not acted on does afterward what it does by
        default. Where they have, one that comes again does not disturb the end of this process.
        """
        # Python takes handlers from the main thread alone.
        is_main = threading.current_thread() is threading.main_thread()
        taken = {
            each: handler
            for each in SIGNALS
            if is_main and (handler := signal.getsignal(each)) in _DEFAULTS
        }
        for each in taken:
            signal.signal(each, self._note)
        try:
            yield
        except Preempted as asked:
            self._received = 0
            if asked.signal != signal.SIGINT:
                taken = {}
            raise
        except BaseException:
            self._received = 0  # the run has failed: that is told, and not the signal
            raise
        finally:
            for each, handler in taken.items():
                signal.signal(each, handler)
            if self._received:
                signal.raise_signal(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number
        if number == signal.SIGHUP:
            leave_lost_terminal()
        if number == signal.SIGINT:
            is_interactive = hasattr(sys, "ps1")
            signal.signal(number, signal.default_int_handler if is_interactive else signal.SIG_DFL)
            if sys.stderr.isatty():
                # The progress bar hides it, and has no say when the next one ends the process.
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)

    def asked(self) -> int:
        """The signal that a rank was sent, 0 if none was; to be asked by all ranks each step."""
        if collectives.world_size() == 1:
            return self._received
        self._steps += 1
        if self._steps < self._interval:
            return 0
        return self._agree()

    def _agree(self) -> int:
        own = torch.tensor([float(self._received), -float(self._steps_a_second())])
        asked, interval = collectives.all_reduce(own, "max").tolist()
        self._interval, self._steps, self._since = -int(interval), 0, time.monotonic()
        return int(asked)

    def _steps_a_second(self) -> int:
        """Steps until the next agreement, as this rank would have it; growth is bounded."""
        rate = self._steps / max(time.monotonic() - self._since, 1e-6)
        return max(1, min(int(rate * _SECONDS), 2 * self._interval, _MOST_STEPS))
