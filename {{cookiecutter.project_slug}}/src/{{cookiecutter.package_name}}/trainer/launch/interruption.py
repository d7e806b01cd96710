"""Ctrl-C: what is said when it has ended a fit, with the command that resumes it."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ..arguments import redaction
from ..errors import ConfigurationError
from . import cluster
from .cluster import Layout

EXIT_CODE = 128 + signal.SIGINT
WORD = "interrupted"
_RESUME = "--trainer.resume"
_OLDER_RESUME = "--trainer.resume_from_checkpoint"


class Interrupted(KeyboardInterrupt):
    """SIGINT (Ctrl-C) has ended a fit, which saved first; its text says how to resume.

    Uncaught, it ends a script with that line in the place of a traceback.

    Args:
        step: optimizer steps made, after which the run was saved.
        directory: of the run.
        is_command: whether the command line has started the run, and not a script.
    """

    def __init__(self, step: int, directory: str, is_command: bool) -> None:
        how = _command(directory) if is_command else f"Trainer(resume={directory!r})"
        super().__init__(f"{WORD}: saved after step {step}; resume with: {how}")
        self.step = step
        self.directory = directory
        self.is_command = is_command


def is_told_here() -> bool:
    """Whether this process speaks for all ranks, as far as it can tell."""
    return _layout().is_main


def show_in_one_line(interrupted: Interrupted, is_told: bool) -> None:
    """Have Python show one line for an error, if it ends this process, and no traceback.

    Args:
        interrupted: the error.
        is_told: False shows nothing of it: another process does.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not interrupted:
            previous(kind, value, trace)
            return
        if is_told:
            print(value, file=sys.stderr, flush=True)
        sys.exit(EXIT_CODE)  # Python knows the code for KeyboardInterrupt itself alone

    sys.excepthook = hook


def show_nothing() -> None:
    """Have Python show nothing of a KeyboardInterrupt that ends this process."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, KeyboardInterrupt):
            previous(kind, value, trace)

    sys.excepthook = hook


def _command(directory: str) -> str:
    words, same = list(sys.orig_argv), ""
    layout = _layout()
    if layout.source == "torchelastic":
        # torchrun is this process' parent.
        with contextlib.suppress(OSError):
            content = Path(f"/proc/{os.getppid()}/cmdline").read_text()
            words = content.rstrip("\0").split("\0")
    elif layout.started_outside:
        same = "the same launcher and "
    return same + shlex.join(redaction.command(resuming(words, directory)))


def resuming(words: Sequence[str], directory: str) -> list[str]:
    """A command that resumes a run, from the one that began it.

    Args:
        words: of the command.
        directory: of the run; it replaces what was resumed.
    """
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, has_value, _ = word.partition("=")
        if name not in (_RESUME, _OLDER_RESUME):
            kept.append(word)
        elif not has_value:
            next(rest, None)
    return [*kept, _RESUME, directory]


def _layout() -> Layout:
    with contextlib.suppress(ConfigurationError):
        return cluster.detect()
    return Layout()
