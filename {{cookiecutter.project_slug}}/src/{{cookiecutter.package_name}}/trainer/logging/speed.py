"""How fast a fit trains, measured between two logged steps without waiting for the device."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Speed:
    """Measures steps, and the time that they wait for data; not validation and checkpoints.

    Args:
        samples_per_step: The effective batch size; ``None`` if unknown.
    """

    def __init__(self, samples_per_step: int | None) -> None:
        self._samples = samples_per_step
        self.start(0)

    def start(self, step: int) -> None:
        """Measure from a step on."""
        self._step, self._waited, self._paused = step, 0.0, 0.0
        self._started = time.perf_counter()

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over batches, and measure how long each is waited for."""
        clock = time.perf_counter
        started = clock()
        for batch in batches:
            self._waited += clock() - started
            yield batch
            started = clock()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in this context."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - started

    def take(self, step: int) -> dict[str, float]:
        """Values of the steps since the last call, of which this one is the last."""
        seconds = max(time.perf_counter() - self._started - self._paused, 1e-9)
        steps, waited = max(1, step - self._step), self._waited
        self.start(step)
        values = {"speed/seconds_per_step": seconds / steps, "speed/data_wait": waited / seconds}
        if self._samples:
            values["speed/samples_per_second"] = self._samples * steps / seconds
        return values
