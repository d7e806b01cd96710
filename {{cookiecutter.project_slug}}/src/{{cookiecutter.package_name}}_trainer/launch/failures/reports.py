"""Failure reports of ranks, so that the launcher shows the first failure and not the last.

Why not torchelastic's ``record`` and ``ErrorHandler`` (the template's
``tests/trainer/test_error_files.py``): their times are whole seconds, so the rank that failed first
cannot be told from those that lost it in the same second. Their files contain no exit code and the
traceback of a ``UserError``, and are not written atomically.
"""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ...errors import EarlyExit, UserError
from ...options import redaction
from .. import collectives, files, interruption, outcome, preemption
from ..interruption import Interrupted
from ..preemption import Preempted
from . import leftover_threads, stacks
from .watchdog import DIRECTORY, process_watchdog

# How long a rank that only lost a peer waits for SIGTERM before it reports the loss.
_TERMINATION_SECONDS = 8.0
_USER_ERROR = 2
# Set by our launcher to its process id, and by a rank to its own: child processes have another.
PARENT = "TRAINER_PARENT_PID"
RANK_PROCESS = "TRAINER_RANK_PID"
_INTERRUPTED, _STARTED, _WORKING = "interrupted.json", "started", "working"
_EXPENDABLE = "expendable"


class RankError(RuntimeError):
    """A rank other than this process failed; the message is all that is worth showing."""


@dataclass(frozen=True)
class Failure:
    """The first rank that failed, its exit code, and the message to show."""

    rank: int
    code: int
    message: str
    is_user_error: bool = False
    """Whether the error is a ``UserError``, which is shown without a traceback."""
    interrupted: Interrupted | None = None
    """The interrupt (SIGINT) that ended the run, if the ranks saved a checkpoint."""

    @property
    def lines(self) -> list[str]:
        """The lines of the message, without the prefix ``rank N: error:``."""
        prefix = f"rank {self.rank}: error: "
        return [line.removeprefix(prefix) for line in self.message.splitlines()]


def report_failure(
    error: BaseException, is_final: bool = False, lost_peer: Sequence[str] = ()
) -> RankError | None:
    """Write a rank's failure report for its launcher: ours, or torchelastic.

    A rank that only lost a peer first waits for the launcher to terminate it, so that only the
    peer's error is reported. If it is not terminated, the peer hangs: then the report contains
    the stack of each rank.

    Args:
        error: The error that ended the rank's work.
        is_final: Whether the process ends with this error: our launcher then need not wait.
        lost_peer: Names of an engine's exceptions that only report the loss of a peer.

    Returns:
        The error to raise instead, if a peer caused the failure.
    """
    if isinstance(error, KeyboardInterrupt | Preempted):
        if isinstance(error, Interrupted):
            _write_interrupt(error)
        return None
    if isinstance(error, SystemExit):
        process_watchdog.record_exit(f"called sys.exit({error.code!r})", error)
        if not error.code:
            return None  # if not all ranks exit, the others report that this one did
    is_lost = process_watchdog.is_armed and _is_lost_peer(error, lost_peer)
    loss = _lost_peer_error(error) if is_lost else None
    outcome.write_failure(describe(loss or error, f"rank {collectives.rank()}: "))
    _write_report(loss or error, is_final)
    return loss


def end_failed(error: BaseException, lost_peer: Sequence[str] = ()) -> NoReturn:
    """Report a rank's failure and end its process without destroying its process group.

    With NCCL, destroying it would wait for peers, which wait in a collective for this rank.
    """
    shown = report_failure(error, True, lost_peer) or error
    _exit_after_report(shown)


def end_hung(reason: str) -> NoReturn:
    """Report the stack of each rank and end this rank, whose main thread hangs in a collective.

    Args:
        reason: Which collective timed out, and after what time.
    """
    position = stacks.of_main_thread()
    text = _describe_lost_peers(position, f"{reason}; the strategy's timeout_seconds sets how long")
    if text is None:
        rank, hint = collectives.rank(), process_watchdog.other_nodes_hint() or "all ranks wait"
        text = f"rank {rank} waited at:\n{position}\nrank {rank}: {reason}; {hint}"
    error = RankError(text)
    outcome.write_failure(text)
    _write_report(error, is_final=True)
    _exit_after_report(error)


def _exit_after_report(error: BaseException) -> NoReturn:
    """End this process after its report is written; print the error if no launcher does."""
    if not is_reported():
        _print(describe(error, f"rank {collectives.rank()}: "))
    process_watchdog.disarm()
    leftover_threads.end_now(_code(error) or 1)


def end_process(error: UserError) -> NoReturn:
    """Report an error and end this rank at once: for a thread, if another hangs in the kernel."""
    text = describe(error, f"rank {os.environ.get('RANK', '0')}: ")
    outcome.write_failure(text)
    _write_report(error)
    if not is_reported():
        _print(text)
    os._exit(_USER_ERROR)


def _print(text: str) -> None:
    # Write once, so that lines of ranks do not mix. The terminal may be closed.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _lost_peer_error(error: BaseException) -> RankError | None:
    description = _describe_lost_peers(stacks.of_error(error), _reason(error))
    if description is not None:
        return RankError(description)
    if hint := process_watchdog.other_nodes_hint():
        error.add_note(hint)
    return None


def _describe_lost_peers(position: str, reason: str) -> str | None:
    process_watchdog.record_loss(position)
    process_watchdog.wait_for_termination(_TERMINATION_SECONDS)
    description = process_watchdog.describe_hang(reason)
    if description is not None and _directory() is None:  # our launcher kills them itself
        process_watchdog.kill_hung_peers_at_exit()
    return description


def _reason(error: BaseException) -> str:
    """The first sentence of an error of gloo, NCCL or the store, without its C++ location."""
    text = re.sub(r"^\[[^]]*\]\s*", "", str(stacks.root(error)).strip())
    sentence = re.split(r"\.\s|\n", text, maxsplit=1)[0][:200]
    is_timeout = re.search("timed out|timeout", sentence, re.IGNORECASE)
    return sentence + ("; the strategy's timeout_seconds sets how long" if is_timeout else "")


def _write_report(error: BaseException, is_final: bool = False) -> None:
    if not os.environ.get("RANK", "").isdecimal():
        return
    rank = int(os.environ["RANK"])
    message = describe(error, f"rank {rank}: ")
    if directory := _directory():
        report = {
            "rank": rank,
            "time": time.time(),
            "code": _code(error),
            "message": message,
            "is_user_error": isinstance(error, UserError),
            "is_final": is_final,
        }
        files.write_atomically(_report(directory, rank), json.dumps(report))
        _hide_traceback(error)
    elif file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
        more = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": more}}
        files.write_atomically(Path(file), json.dumps(report))


def _write_interrupt(error: Interrupted) -> None:
    if (directory := _directory()) and collectives.rank() == 0:
        report = [error.step, error.directory, error.is_command]
        files.write_atomically(directory / _INTERRUPTED, json.dumps(report))


def interrupted(directory: Path) -> Interrupted | None:
    """Read rank 0's record of an interrupt; ``None`` if the ranks did not save a checkpoint."""
    try:
        step, run, is_command = json.loads((directory / _INTERRUPTED).read_text())
    except OSError:
        return None
    return Interrupted(step, run, is_command)


def report_start() -> None:
    """Report to our launcher that this rank handles SIGINT; the launcher prints the message.

    Before that, a rank would print the traceback of its imports on SIGINT.
    """
    if directory := _directory():
        os.environ[RANK_PROCESS] = str(os.getpid())
        interruption.hide_keyboard_interrupt()
        with contextlib.suppress(OSError):  # the launcher has ended, and its directory
            (directory / f"{_STARTED}-{os.environ['RANK']}").touch()
            # A script may catch an error and train again; then the old report must not be shown.
            _report(directory, os.environ["RANK"]).unlink(missing_ok=True)
        preemption.unblock_sigint()


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Tell our launcher that this rank must not end in this context, even with exit code 0."""
    directory = os.environ.get(DIRECTORY)
    path = Path(directory) / f"{_WORKING}-{os.environ['RANK']}" if directory else None
    if path is not None:
        path.touch()
    try:
        yield
    finally:
        if path is not None:
            path.with_name(f"{_EXPENDABLE}-{os.environ['RANK']}").unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def allow_loss() -> None:
    """Tell our launcher that the other ranks continue if this one is killed while it works."""
    if directory := _directory():
        (directory / f"{_EXPENDABLE}-{os.environ['RANK']}").touch()


def is_expendable(directory: Path, rank: int) -> bool:
    """Whether a rank has called :func:`allow_loss`."""
    return (directory / f"{_EXPENDABLE}-{rank}").exists()


def ended_early(directory: Path, rank: int) -> bool:
    """Whether a rank has ended while it was still :func:`working`."""
    return (directory / f"{_WORKING}-{rank}").exists()


def has_started(directory: Path, rank: int) -> bool:
    """Whether a rank has called :func:`report_start`."""
    return (directory / f"{_STARTED}-{rank}").exists()


def _code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return _USER_ERROR if isinstance(error, UserError) else 1


def _hide_traceback(error: BaseException) -> None:
    """Print no traceback if this error ends the process: the launcher prints it."""
    print_error = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            print_error(kind, value, trace)

    sys.excepthook = hook


def first_report(directory: Path) -> Failure | None:
    """The earliest reported failure."""
    reports = _reports(directory)
    if not reports:
        return None
    first = min(reports, key=lambda report: report["time"])
    del first["time"], first["is_final"]
    return Failure(**first)


def final(directory: Path) -> list[int]:
    """Ranks that have reported a failure that ends their process."""
    return [report["rank"] for report in _reports(directory) if report["is_final"]]


def _reports(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in directory.glob("rank-*.json")]


def _report(directory: Path, rank: int | str) -> Path:
    return directory / f"rank-{rank}.json"


def is_reported() -> bool:
    """Whether our launcher prints this rank's failure, so that the rank need not.

    False if the variables were inherited from a rank: the launcher does not print for commands.
    """
    return _directory() is not None and os.environ.get(PARENT) == str(os.getppid())


def _directory() -> Path | None:
    """Directory of failure reports, if one of our launchers started this rank."""
    name = os.environ.get(DIRECTORY)
    return Path(name) if name and PARENT in os.environ and Path(name).is_dir() else None


def describe(error: BaseException, prefix: str = "") -> str:
    """Format an error: one line per problem for a ``UserError``, else the traceback.

    Secrets inside it are redacted.
    """
    return redaction.message(_text_of(error, prefix))


def _text_of(error: BaseException, prefix: str) -> str:
    if isinstance(error, UserError):
        return "\n".join(f"{prefix}error: {line}" for line in error.problems)
    if isinstance(error, EarlyExit):
        return f"{prefix}error: {error}"
    if isinstance(error, RankError):
        return str(error)
    if isinstance(error, SystemExit):
        return f"{stacks.of_error(error)}\n{prefix}sys.exit({error.code!r}) was called"
    text = "".join(traceback.format_exception(error)).rstrip()
    return f"{text}\n{prefix}{type(error).__name__}: {error}" if prefix else text


def _is_lost_peer(error: BaseException, kinds: Sequence[str] = ()) -> bool:
    """Whether an error only reports a lost peer: the cause is in the peer, not here."""
    cause = stacks.root(error)
    if not isinstance(cause, RuntimeError):
        return False
    text = str(cause)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
    kinds = ("DistNetworkError", "DistStoreError", *kinds)
    return type(cause).__name__ in kinds or any(sign in text for sign in signs)
