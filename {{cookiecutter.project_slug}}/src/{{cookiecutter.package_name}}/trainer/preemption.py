"""A run that is told to end saves first: a signal sets a flag, and the ranks agree on it.

Nothing is done inside the signal handler: a collective or a save there would meet the step's own.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch

from . import distributed

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# About how long a signal waits until all ranks know of it, beside the step that is being made.
_SECONDS = 1.0
_MOST_STEPS = 1000


class Preempted(SystemExit):
    """The run has saved and ends, as a signal has asked; the exit code is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


class Preemption:
    """Notices SIGTERM and SIGUSR1, and has all ranks act on it after the same step.

    Ranks agree by one reduction about every second: the number of steps until the next is agreed
    with each, so that fast steps do not pay for it.

    Args:
        device: of the tensor that is reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._received = 0
        self._steps = 0
        self._interval = 1
        self._since = time.monotonic()

    @contextlib.contextmanager
    def noticing(self) -> Iterator[None]:
        """Only note the signals for a while; a handler that the program has set is left alone.

        A signal that the ranks have not acted on does afterwards what it does by default. Where
        they have, one that comes again does not disturb the end of this process.
        """
        # Python takes handlers from the main thread alone.
        is_main = threading.current_thread() is threading.main_thread()
        taken = [each for each in SIGNALS if is_main and signal.getsignal(each) == signal.SIG_DFL]
        for each in taken:
            signal.signal(each, self._note)
        try:
            yield
        except Preempted:
            taken = []
            raise
        finally:
            for each in taken:
                signal.signal(each, signal.SIG_DFL)
            if taken and self._received:
                signal.raise_signal(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    def asked(self) -> int:
        """The signal that a rank was sent, 0 if none was; to be asked by all ranks each step."""
        if distributed.world_size() == 1:
            return self._received
        self._steps += 1
        if self._steps < self._interval:
            return 0
        return self._agree()

    def _agree(self) -> int:
        own = torch.tensor([float(self._received), -float(self._steps_a_second())])
        asked, interval = distributed.all_reduce(own.to(self._device), "max").tolist()
        self._interval, self._steps, self._since = -int(interval), 0, time.monotonic()
        return int(asked)

    def _steps_a_second(self) -> int:
        """Steps until the next agreement, as this rank would have it; growth is bounded."""
        rate = self._steps / max(time.monotonic() - self._since, 1e-6)
        return max(1, min(int(rate * _SECONDS), 2 * self._interval, _MOST_STEPS))
