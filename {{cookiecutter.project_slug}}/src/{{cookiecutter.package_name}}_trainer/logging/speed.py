"""How fast a fit trains, measured between two logged steps without waiting for the device."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.profiler import record_function

_MEBIBYTE = 2**20


class Speed:
    """Measures steps, the time that they wait for data, and validation and checkpoints apart.

    ``waited`` and ``tokens``: seconds of waiting for batches, and their tokens, since the last
    values; added to by who reads them. ``count_tokens``: those of all replicas in a batch;
    ``peak_samples``: samples per second at the peak of the devices.
    """

    def __init__(
        self,
        samples_per_step: int | None,
        count_tokens: Callable[[Any], int] | None = None,
        peak_samples: float | None = None,
    ) -> None:
        self._samples = samples_per_step
        self.count_tokens = count_tokens
        self._peak_samples = peak_samples
        self.start(0)

    def start(self, step: int) -> None:
        """Measure from a step on."""
        self.since = step
        self.waited, self.tokens = 0.0, 0
        self._paused = {"checkpoint": 0.0, "validation": 0.0}
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def paused(self, what: Literal["checkpoint", "validation"]) -> Iterator[None]:
        """Do not count the time in this context as that of steps.

        In a profiler's trace it is marked as ``trainer:checkpoint`` or ``trainer:validation``.
        """
        started = time.perf_counter()
        try:
            with record_function(f"trainer:{what}"):
                yield
        finally:
            self._paused[what] += time.perf_counter() - started

    def take(self, step: int) -> dict[str, float]:
        """Values of the steps since the last call, of which this one is the last."""
        paused = self._paused
        seconds = max(time.perf_counter() - self._started - sum(paused.values()), 1e-9)
        steps, waited, tokens = max(1, step - self.since), self.waited, self.tokens
        self.start(step)
        values = {"speed/seconds_per_step": seconds / steps, "speed/data_wait": waited / seconds}
        if self._samples:
            values["speed/samples_per_second"] = rate = self._samples * steps / seconds
            if self._peak_samples:
                values["speed/mfu"] = rate / self._peak_samples
        if self.count_tokens is not None:
            values["speed/tokens_per_second"] = tokens / seconds
        return values | {f"speed/{what}_seconds": each for what, each in paused.items()}


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this process so far, in MiB: what torch has allocated on a GPU, or the RAM."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"speed/peak_memory_mib": peak / _MEBIBYTE}
