"""Signals: ranks agree on one, save a checkpoint after the same step, and end.

The signal handler only sets a flag: a collective or a save in it would interfere with the step's.
After SIGINT (Ctrl-C) one line says how to resume the run.
"""

import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from types import FrameType, TracebackType

import torch
from torch import Tensor

from . import collectives, output

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
INTERRUPTED_CODE = 128 + signal.SIGINT
INTERRUPTED = "interrupted"
STOP = 65  # requested like a signal, but above the numbers of signals
SAVE_SECONDS = "TRAINER_SAVE_SECONDS"  # ranks may run so long after a signal, to finish and save
_SHOW_CURSOR = b"\x1b[?25h"
_SECONDS = 1.0  # approximate time until all ranks know of a signal, in addition to the current step
_MOST_STEPS = 1000


class Preempted(SystemExit):
    """The run saved a checkpoint and ends by a signal; the exit code is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


def name_of(number: int) -> str:
    """The name of a signal; real-time ones have none."""
    return {known.value: known.name for known in signal.Signals}.get(number, f"signal {number}")


class Interrupted(KeyboardInterrupt):
    """SIGINT (Ctrl-C) ended a fit after it saved a checkpoint; the message says how to resume.

    ``is_command``: whether the run was started by the command line, not by a script.
    """

    def __init__(self, step: int, directory: str, is_command: bool) -> None:
        option = f"the same command and --trainer.resume {directory}"
        how = option if is_command else f"Trainer(resume={directory!r})"
        super().__init__(f"{INTERRUPTED}: saved after step {step}; resume with: {how}")
        self.step, self.directory, self.is_command = step, directory, is_command

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback."""
        return [str(self)]


class Preemption:
    """Records the :data:`SIGNALS` and makes all ranks act on them after the same step.

    Ranks agree about every second by an all-reduce on the CPU, or by the strategy's ``agree``, in
    which they also agree on the number of steps until the next one. Create it once connected.
    """

    def __init__(self, agree: Callable[[Tensor], Tensor] | None = None) -> None:
        self._agree = agree or partial(collectives.all_reduce, how="max")
        self._is_alone = collectives.world_size() == 1
        self._received, self._steps, self._interval = 0, 0, 1
        self._since = time.monotonic()

    @contextlib.contextmanager
    def recording_signals(self) -> Iterator[None]:
        """Record the signals in this context; keep handlers that the program has set.

        A second SIGINT (Ctrl-C) ends the process at once; in an interactive session it raises
        KeyboardInterrupt. On exit, a signal that the ranks have not acted on is raised again; after
        one that they have acted on, a repeated signal does not disturb the shutdown.
        """
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        # Python accepts signal handlers only from the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        numbers = [number for number in SIGNALS if is_main and signal.getsignal(number) in defaults]
        replaced = {number: signal.signal(number, self._record_signal) for number in numbers}
        try:
            yield
        except BaseException as error:
            self._received = 0  # the ranks have acted on it, or the run failed for another reason
            if isinstance(error, Preempted) and error.signal != signal.SIGINT:
                replaced = {}
            raise
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)
            if self._received == signal.SIGINT:
                raise Preempted(signal.SIGINT)  # all is saved: the fit ends as if interrupted
            if self._received not in (0, STOP):
                signal.raise_signal(self._received)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = number if self._received == STOP else self._received or number
        if number == signal.SIGHUP:
            redirect_lost_terminal()
        if number == signal.SIGINT:
            is_interactive = hasattr(sys, "ps1")
            signal.signal(number, signal.default_int_handler if is_interactive else signal.SIG_DFL)
            if output.is_terminal():
                # The progress bar hides the cursor, and cannot restore it if a second SIGINT comes.
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)

    def request_stop(self) -> None:
        """Ask all ranks to end training, unless a signal was received."""
        self._received = self._received or STOP

    @property
    def has_requested_stop(self) -> bool:
        return self._received == STOP

    def is_stop_requested(self) -> bool:
        """Whether a rank has asked to end training; all ranks call this at the same time."""
        flag = torch.tensor([float(self.has_requested_stop)])
        return bool(collectives.all_reduce(flag, "max").item())

    def requested(self) -> int:
        """Number of the signal that a rank received, STOP, or 0; all ranks call it after a step."""
        if self._is_alone:
            return self._received
        self._steps += 1
        if self._steps < self._interval:
            return 0
        # This rank's proposal for the steps until the next agreement; its growth is bounded.
        rate = self._steps / max(time.monotonic() - self._since, 1e-6)
        proposal = max(1, min(int(rate * _SECONDS), 2 * self._interval, _MOST_STEPS))
        local = torch.tensor([float(self._received), -float(proposal)])
        requested, interval = self._agree(local).tolist()
        self._interval, self._steps, self._since = -int(interval), 0, time.monotonic()
        return int(requested)


@contextlib.contextmanager
def block_sigint_in_children(method: str = "fork") -> Iterator[None]:
    """Block SIGINT in processes that a method starts in this context; in this one it is delayed."""
    if method != "fork":
        resource_tracker.ensure_running()  # else the first process starts it, and unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_ignored(number: int) -> bool:
    """Whether this process was started with SIGHUP ignored, for example by nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def redirect_lost_terminal() -> None:
    """Redirect output to ``/dev/null`` if the terminal is gone: printing would raise an error."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # the program has closed it
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                output.to_nowhere(descriptor)


def hide_traceback(
    hidden: BaseException | type[BaseException], line: str = "", code: int | None = None
) -> None:
    """Print only a line, or nothing, if an error, or one of a class, ends this process."""
    print_error = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not hidden and not (isinstance(hidden, type) and isinstance(value, hidden)):
            print_error(kind, value, trace)
            return
        if line:
            output.print_lines(line, error=True)
        if code is not None:
            sys.exit(code)

    sys.excepthook = hook
