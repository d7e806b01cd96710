"""Ctrl-C (SIGINT): end a fit with one line that contains the command to resume it."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ..errors import ConfigurationError
from ..options import redaction
from . import cluster
from .cluster import Layout

EXIT_CODE = 128 + signal.SIGINT
WORD = "interrupted"
_RESUME = ("--trainer.resume", "--trainer.resume_from_checkpoint")


class Interrupted(KeyboardInterrupt):
    """SIGINT (Ctrl-C) ended a fit after it saved a checkpoint; the message says how to resume.

    If it is not caught, Python prints the message instead of a traceback.

    Args:
        step: Number of optimizer steps when the checkpoint was saved.
        directory: The run directory.
        is_command: Whether the run was started by the command line, not by a script.
    """

    def __init__(self, step: int, directory: str, is_command: bool) -> None:
        how = _resume_command(directory) if is_command else f"Trainer(resume={directory!r})"
        super().__init__(f"{WORD}: saved after step {step}; resume with: {how}")
        self.step = step
        self.directory = directory
        self.is_command = is_command


def is_main_rank() -> bool:
    """Whether this process is the main rank, according to the environment."""
    return _layout().is_main


def hide_traceback(interrupted: Interrupted, prints: bool) -> None:
    """Print an error as one line, without a traceback, if it ends this process.

    Args:
        interrupted: The error.
        prints: False prints nothing: another process prints the line.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not interrupted:
            previous(kind, value, trace)
            return
        if prints:
            print(value, file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)  # Python does so for KeyboardInterrupt itself, not for subclasses

    sys.excepthook = hook


def hide_keyboard_interrupt() -> None:
    """Print nothing for a KeyboardInterrupt that ends this process."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, KeyboardInterrupt):
            previous(kind, value, trace)

    sys.excepthook = hook


def _resume_command(directory: str) -> str:
    words, same = list(sys.orig_argv), ""
    layout = _layout()
    if layout.source == "torchelastic":
        # The parent process is torchrun.
        with contextlib.suppress(OSError):  # then the words of this rank are shown
            content = Path(f"/proc/{os.getppid()}/cmdline").read_text()
            words = content.rstrip("\0").split("\0")
    elif layout.started_outside:
        same = "the same launcher and "
    return same + shlex.join(redaction.command(resuming(words, directory)))


def resuming(words: Sequence[str], directory: str) -> list[str]:
    """Turn the command of a run into the command that resumes it.

    Args:
        words: The original command.
        directory: The run directory; replaces the value of an earlier resume option.
    """
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, has_value, _ = word.partition("=")
        if name not in _RESUME:
            kept.append(word)
        elif not has_value:
            next(rest, None)
    return [*kept, _RESUME[0], directory]


def _layout() -> Layout:
    with contextlib.suppress(ConfigurationError):  # reported already where a run begins
        return cluster.detect()
    return Layout()
