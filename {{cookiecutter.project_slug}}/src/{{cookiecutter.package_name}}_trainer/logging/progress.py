"""Display progress, a bar or lines, also if nothing reads the output any more (``fit | head``)."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_TERMINAL_SECONDS = 0.5
_LINE_SECONDS = 10.0
_OUTPUT = select.poll()
for _descriptor in (1, 2):
    _OUTPUT.register(_descriptor, 0)


def print_lines(*lines: str, error: bool = False) -> None:
    """Print lines, to stderr if ``error``, in any encoding, even if nothing reads them any more."""
    _drop_output()
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)
    with contextlib.suppress(BrokenPipeError):  # closed since then; the next one says so
        print(text, file=stream, flush=True)


def _drop_output() -> None:
    """Discard output that nothing reads from now on, and say so: a print would raise an error."""
    events = _OUTPUT.poll(0)
    if closed := [descriptor for descriptor, event in events if event & select.POLLERR]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in closed:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        sys.stderr.write("note: nothing reads the output any more; the command continues\n")


class Progress:
    """Displays step, loss, speed and remaining time; what is ``None`` is not known."""

    def __init__(
        self, enabled: bool, total_steps: int | None, samples_per_step: int | None
    ) -> None:
        self._enabled = enabled
        self._total = total_steps
        self._samples = samples_per_step
        self._bar: RichProgress | None = None
        self._interval = _TERMINAL_SECONDS if sys.stderr.isatty() else _LINE_SECONDS
        self._title = ""
        self._first_step = 0
        self._started = self._shown = time.monotonic()

    def start(self, step: int) -> None:
        """Start at a step: 0, or the step of the resumed checkpoint."""
        self._first_step = step
        self._started = self._shown = time.monotonic()
        if self._enabled and sys.stderr.isatty():
            self._bar = _make_bar(self._total, step)
            self._bar.start()

    def begin_epoch(self, epoch: int, epochs: int | None) -> None:
        """Set the epoch, counted from 0."""
        self._title = f"epoch {epoch + 1}" + (f"/{epochs}" if epochs else "")

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Update after a step; values are read only if the display is due."""
        if _OUTPUT.poll(0):
            _drop_output()
        if self._enabled and time.monotonic() - self._shown >= self._interval:
            self.show(step, values)

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Display the current progress now."""
        if not self._enabled:
            return
        self._shown = time.monotonic()
        numbers = "  ".join(f"{name} {float(value):.4g}" for name, value in values.items())
        rate = (step - self._first_step) / max(self._shown - self._started, 1e-9)
        speed = f"{rate * self._samples:.0f} samples/s" if self._samples else f"{rate:.1f} steps/s"
        speed = speed if rate else ""  # no step yet after a resume
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=step, values=numbers, speed=speed)
            self._bar.update(task, description=self._title, refresh=True)
            return
        of = f"/{self._total}" if self._total else ""
        left = ""
        if self._total and rate:
            left = f"  {timedelta(seconds=int((self._total - step) / rate))} left"
        line = f"{self._title}  step {step}{of}  {numbers}  {speed}{left}"
        print(line, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Stop the display."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _make_bar(total: int | None, step: int) -> "RichProgress":
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[values]}  {task.fields[speed]}"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        # Refreshed explicitly: a thread that redraws would slow down every step.
        auto_refresh=False,
    )
    bar.add_task("", total=total, completed=step, values="", speed="")
    return bar
