"""What a rank tells its launcher: its state, in files of the launcher's folder, and its outcome.

For the script that started the run, the file named by ``TRAINER_OUTCOME`` has its outcome in one
line: ``finished step 120``, ``preempted SIGUSR1 step 57``, or ``failed rank 1: ValueError: bad``,
as srun and torchrun replace exit codes. If the file does not exist, the run was killed.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ..errors import UserError
from . import collectives, files, hangs, signals

OUTCOME = "TRAINER_OUTCOME"
DIRECTORY = "TRAINER_FAILURE_DIR"  # set by our launcher: the folder of the reports
# Set by our launcher to its process id, and by a rank to its own: child processes have another.
PARENT = "TRAINER_PARENT_PID"
RANK_PROCESS = "TRAINER_RANK_PID"

State = Literal["", "started", "working"]
"""``started``: it handles SIGINT; ``working``: it must not end, even with exit code 0."""


def report_start() -> None:
    """Report to our launcher that this rank handles SIGINT, without a traceback of imports."""
    if directory := launcher_directory():
        os.environ[RANK_PROCESS] = str(os.getpid())
        signals.hide_traceback(KeyboardInterrupt)
        # A script may catch an error and train again; then the old report must not be shown.
        (directory / f"rank-{own_rank()}.json").unlink(missing_ok=True)
        set_state("started")
        if threading.current_thread() is threading.main_thread():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by our launcher


def set_state(state: State) -> None:
    """Tell our launcher the state of this rank."""
    if directory := launcher_directory():
        with contextlib.suppress(OSError):  # the launcher has ended, and its directory
            (directory / f"state-{own_rank()}").write_text(state)


def watch_for_hangs(seconds: float) -> None:
    """Print this rank's stack if it hangs or ends by a fault; see :meth:`.hangs.HangTimer.arm`."""
    # An elastic run may have lost all other ranks; its agent starts one again that has ended.
    if collectives.world_size() > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        directory = launcher_directory()
        hangs.timer.arm(seconds, stack_file(directory, own_rank()) if directory else None)


def is_reported() -> bool:
    """Whether our launcher prints this process' failure; it does not for a rank's own children."""
    return launcher_directory() is not None and os.environ.get(PARENT) == str(os.getppid())


def launcher_directory() -> Path | None:
    """Folder of the reports, if one of our launchers started this rank."""
    name = os.environ.get(DIRECTORY)
    return Path(name) if name and PARENT in os.environ and Path(name).is_dir() else None


def own_rank() -> int:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else collectives.rank()


def exit_code(error: BaseException | None) -> int:
    """The exit code of a process that an error ends, if any does."""
    if error is None or isinstance(error, SystemExit):
        code = getattr(error, "code", None)
        return code if isinstance(code, int) else int(code is not None)
    if isinstance(error, KeyboardInterrupt):
        return signals.INTERRUPTED_CODE
    return error.code if isinstance(error, UserError) else 1


def make_outcome_absolute(directory: Path) -> None:
    """Let a relative path mean a file in ``directory``, whatever directory user code changes to."""
    if path := _outcome():
        os.environ[OUTCOME] = str(directory / path)


def remove_outcome() -> None:
    """Remove the outcome of an earlier attempt; the main rank calls this at the start."""
    if path := _outcome():
        path.unlink(missing_ok=True)


def write_outcome(line: str) -> None:
    """Write the outcome of the run; called by the main rank."""
    if path := _outcome():
        files.write_atomically(path, f"{line}\n")


def write_failed(reason: str) -> None:
    """Write the last line of an error, unless another rank has done so; called by any rank."""
    if (path := _outcome()) and (lines := reason.strip().splitlines()):
        # The failure is printed too; an error while writing the file must not replace it.
        with contextlib.suppress(OSError, ValueError):
            files.write_first(path, f"failed {lines[-1]}\n")


def _outcome() -> Path | None:
    return Path(os.environ[OUTCOME]) if os.environ.get(OUTCOME) else None


def state(directory: Path, rank: int) -> str:
    path = directory / f"state-{rank}"
    return path.read_text("utf-8") if path.exists() else ""


def names(ranks: Iterable[int], verb: str = "") -> str:
    """``"rank 1"``, or ``"ranks 0 and 2"``, with the verb in the singular or plural."""
    *others, last = map(str, ranks)
    listed = f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
    return f"{listed} {verb.removesuffix('s') if others else verb}".rstrip()


def stack_file(directory: Path, rank: int) -> Path:
    return directory / f"stack-{rank}"
