"""Display the progress of a fit, and measure its speed without synchronizing the device."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.profiler import record_function

from ..launch import output

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_TERMINAL_SECONDS, _LINE_SECONDS = 0.5, 10.0


class Progress:
    """Displays step, loss, speed and remaining time; what is ``None`` is not known."""

    def __init__(self, shows: bool, total_steps: int | None, samples_per_step: int | None) -> None:
        self._enabled, self._total, self._samples = shows, total_steps, samples_per_step
        self._bar: RichProgress | None = None
        self._interval = _TERMINAL_SECONDS if output.is_terminal() else _LINE_SECONDS
        self._title = self._line = ""
        self._started = self._shown = 0.0

    def start(self, step: int) -> None:
        """Start at a step: 0, or the step of the resumed checkpoint."""
        self._first_step = step
        self._started = self._shown = time.monotonic()
        if self._enabled and output.is_terminal():
            self._bar = _make_bar(self._total, step)
            self._bar.start()

    def begin_epoch(self, epoch: int, epochs: int | None) -> None:
        """Set the epoch, counted from 0; above a bar stays a line of the one before."""
        if self._bar is not None and self._line:
            self._bar.console.print(self._line, markup=False, highlight=False)
        self._title = f"epoch {epoch + 1}" + (f"/{epochs}" if epochs else "")

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Update after a step; values are read only if the display is due."""
        if output.UNREAD.poll(0):
            output.discard_unread()
        if self._enabled and time.monotonic() - self._shown >= self._interval:
            self.show(step, values)

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        if not self._enabled:
            return
        self._shown = time.monotonic()
        numbers = "  ".join(f"{name} {float(value):.4g}" for name, value in values.items())
        rate = (step - self._first_step) / max(self._shown - self._started, 1e-9)
        speed = f"{rate * self._samples:.0f} samples/s" if self._samples else f"{rate:.1f} steps/s"
        speed = speed if rate else ""  # no step yet after a resume
        passed = timedelta(seconds=int(self._shown - self._started))
        of = f"/{self._total}" if self._total else ""
        self._line = f"{self._title}  step {step}{of}  {numbers}  {speed}  {passed}"
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=step, values=numbers, speed=speed)
            self._bar.update(task, description=self._title, refresh=True)
            return
        left = ""
        if self._total and rate:
            left = f"  {timedelta(seconds=int((self._total - step) / rate))} left"
        output.print_lines(self._line + left, error=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(total: int | None, step: int) -> "RichProgress":
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    of = len(f"{total or step}/{total or '?'}")  # what a narrow terminal must not cut
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=of)),
        progress.TextColumn("{task.fields[values]}  {task.fields[speed]}"),
        progress.TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,  # a thread that redraws would slow down every step
    )
    bar.add_task("", total=total, completed=step, values="", speed="")
    return bar


class Speed:
    """Measures steps between two logged ones, their waits for data, validations and checkpoints.

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
        self._samples, self._peak_samples = samples_per_step, peak_samples
        self.count_tokens = count_tokens
        self.start(0)

    def start(self, step: int) -> None:
        """Measure from a step on."""
        self.since, self.waited, self.tokens = step, 0.0, 0
        self._paused = {"checkpoint": 0.0, "validation": 0.0}
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def paused(self, phase: Literal["checkpoint", "validation"]) -> Iterator[None]:
        """Do not count the time in this context as that of steps.

        In a profiler's trace it is marked as ``trainer:checkpoint`` or ``trainer:validation``.
        """
        started = time.perf_counter()
        try:
            with record_function(f"trainer:{phase}"):
                yield
        finally:
            self._paused[phase] += time.perf_counter() - started

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
        return values | {f"speed/{phase}_seconds": duration for phase, duration in paused.items()}


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peak memory of this process so far, in MiB: what torch has allocated on a GPU, or the RAM."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"speed/peak_memory_mib": peak / 2**20}
