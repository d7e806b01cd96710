"""Print what a run reports."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint import run_directory
from ..logging import closed_output
from . import announcements
from .plan import Plan


class Console:
    """Prints on the main rank only.

    Args:
        plan: The run's.
        is_command: Whether the run was started by the command line, not by a script.
    """

    def __init__(self, plan: Plan, is_command: bool) -> None:
        self.is_command = is_command
        self._plan = plan
        self._is_main = plan.layout.is_main
        self._shows_progress = plan.options.enable_progress_bar

    def say(self, *lines: str) -> None:
        """Print lines if progress is shown."""
        if lines and self._is_main and self._shows_progress:
            closed_output.show(*lines)

    def note(self, *lines: str) -> None:
        """Print lines to stderr, also if no progress is shown: what a user may not expect."""
        if lines and self._is_main:
            closed_output.show(*(f"note: {line}" for line in lines), error=True)

    def say_where(self, directory: Path) -> None:
        """Print the run directory; a command prints it even if it shows no progress."""
        if self._is_main and (self._shows_progress or self.is_command):
            closed_output.show(announcements.where(self._plan.shown(directory)))

    @contextlib.contextmanager
    def output_of(self, directory: Path) -> Iterator[None]:
        """Send the output of other ranks than the main one into the run directory."""
        if self._is_main:
            yield
            return
        log = directory / "logs" / f"rank-{self._plan.layout.rank}.log"
        with run_directory.output_to(log):
            yield
