"""What a rank says of its failure, so that the first one is shown and not the last."""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ...errors import EarlyExit, UserError
from .. import collectives, files, interruption, outcome, preemption
from ..interruption import Interrupted
from ..preemption import Preempted
from . import leftover_threads, stacks
from .watchdog import DIRECTORY, watchdog

# How long a rank that only lost its peer waits to be ended before it tells of its own loss.
_YIELD_SECONDS = 8.0
_USER_ERROR = 2
# Set by our launcher: its process id; and by a rank: its own, which tells it from what it starts.
PARENT = "TRAINER_PARENT_PID"
RANK_PROCESS = "TRAINER_RANK_PID"
_INTERRUPTED, _STARTED, _WORKING = "interrupted.json", "started", "working"


class RankError(RuntimeError):
    """Another rank than this process has failed; its text is all that is worth showing."""


@dataclass(frozen=True)
class Failure:
    """What ended a run: the rank that failed first, its exit code, and what to show."""

    rank: int
    code: int
    message: str
    is_user_error: bool = False
    """Whether it is a mistake of the user's, which needs no traceback."""
    interrupted: Interrupted | None = None
    """What SIGINT has ended, after the ranks had saved."""

    @property
    def lines(self) -> list[str]:
        """The message's lines, without the words that say what they are."""
        prefix = f"rank {self.rank}: error: "
        return [line.removeprefix(prefix) for line in self.message.splitlines()]


def report_failure(error: BaseException, is_final: bool = False) -> RankError | None:
    """Write down a rank's failure for its launcher: ours, or torchelastic's.

    A rank that only lost a peer first waits to be ended, so that the peer's error stands
    alone. If nothing ends it, the peer hangs: then it is told where each rank stands.

    Args:
        error: what has ended the rank's work.
        is_final: the process ends with it: our launcher acts on the report, and need not wait.

    Returns:
        what to raise instead, where a peer is to blame.
    """
    if isinstance(error, KeyboardInterrupt | Preempted):
        if isinstance(error, Interrupted):
            _write_down_interrupted(error)
        return None
    if isinstance(error, SystemExit):
        watchdog.note_leave(f"called sys.exit({error.code!r})", error)
        if not error.code:
            return None  # perhaps all do so; if not, the others say that this one did
    loss = _blame(error) if watchdog.is_armed and _is_lost_peer(error) else None
    outcome.tell_failure(describe(loss or error, f"rank {collectives.rank()}: "))
    _write_down(loss or error, is_final)
    return loss


def end_failed(error: BaseException) -> NoReturn:
    """Report a rank's failure and end its process, without destroying its process group.

    Over NCCL that would wait for peers, which wait in a collective for this rank.
    """
    shown = report_failure(error, is_final=True) or error
    _end_shown(shown)


def end_hung(reason: str) -> NoReturn:
    """End this rank, whose main thread waits in a collective, and tell where each rank stands.

    Args:
        reason: what has not completed, and in what time.
    """
    position = stacks.of_main_thread()
    told = _accusation(position, f"{reason}; the strategy's timeout_seconds sets how long")
    if told is None:
        rank, elsewhere = collectives.rank(), watchdog.elsewhere() or "all ranks wait"
        told = f"rank {rank} waited at:\n{position}\nrank {rank}: {reason}; {elsewhere}"
    error = RankError(told)
    outcome.tell_failure(told)
    _write_down(error, is_final=True)
    _end_shown(error)


def _end_shown(error: BaseException) -> NoReturn:
    """End this process, its error written down, and shown here where nobody else does."""
    if not is_reported():
        _print(describe(error, f"rank {collectives.rank()}: "))
    watchdog.disarm()
    leftover_threads.end_now(_code(error) or 1)


def end_process(error: UserError) -> NoReturn:
    """End this rank at once, and tell why: for a thread, where another is stuck in the kernel."""
    text = describe(error, f"rank {os.environ.get('RANK', '0')}: ")
    outcome.tell_failure(text)
    _write_down(error)
    if not is_reported():
        _print(text)
    os._exit(_USER_ERROR)


def _print(text: str) -> None:
    # In one write, so that no other rank's line comes between; to a terminal that may be gone.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _blame(error: BaseException) -> RankError | None:
    accusation = _accusation(stacks.of_error(error), _reason(error))
    if accusation is not None:
        return RankError(accusation)
    if elsewhere := watchdog.elsewhere():
        error.add_note(elsewhere)
    return None


def _accusation(position: str, reason: str) -> str | None:
    watchdog.note_loss(position)
    watchdog.wait_to_be_ended(_YIELD_SECONDS)
    accusation = watchdog.accuse(reason)
    if accusation is not None and _directory() is None:  # our own launcher ends them
        watchdog.end_silent_at_exit()
    return accusation


def _reason(error: BaseException) -> str:
    """The first sentence of what gloo, NCCL or the store said, without the place in their code."""
    text = re.sub(r"^\[[^]]*\]\s*", "", str(stacks.root(error)).strip())
    sentence = re.split(r"\.\s|\n", text, maxsplit=1)[0][:200]
    is_timeout = re.search("timed out|timeout", sentence, re.IGNORECASE)
    return sentence + ("; the strategy's timeout_seconds sets how long" if is_timeout else "")


def _write_down(error: BaseException, is_final: bool = False) -> None:
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
        _leave_to_launcher(error)
    elif file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # As torch.distributed.elastic.multiprocessing.errors.ErrorHandler writes it, who would
        # write the whole traceback of a mistake of the user's.
        more = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": more}}
        files.write_atomically(Path(file), json.dumps(report))


def _write_down_interrupted(error: Interrupted) -> None:
    if (directory := _directory()) and collectives.rank() == 0:
        report = [error.step, error.directory, error.is_command]
        files.write_atomically(directory / _INTERRUPTED, json.dumps(report))


def interrupted(directory: Path) -> Interrupted | None:
    """What SIGINT has ended, as rank 0 wrote it down; ``None`` if the ranks have not saved."""
    try:
        step, run, is_command = json.loads((directory / _INTERRUPTED).read_text())
    except OSError:
        return None
    return Interrupted(step, run, is_command)


def note_start() -> None:
    """Tell a launcher of ours that this rank heeds SIGINT, and leave to it to say what was ended.

    Until then a rank would print where it stood in its imports.
    """
    if directory := _directory():
        os.environ[RANK_PROCESS] = str(os.getpid())
        interruption.show_nothing()
        with contextlib.suppress(OSError):
            (directory / f"{_STARTED}-{os.environ['RANK']}").touch()
            # A script may catch an error and train again: what it caught must not be shown later.
            _report(directory, os.environ["RANK"]).unlink(missing_ok=True)
        preemption.hear_interrupts()


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Tell a launcher of ours for a while that this rank must not end yet, even with code 0."""
    directory = os.environ.get(DIRECTORY)
    path = Path(directory) / f"{_WORKING}-{os.environ['RANK']}" if directory else None
    if path is not None:
        path.touch()
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def has_left(directory: Path, rank: int) -> bool:
    """Whether a rank that has ended was still :func:`working`."""
    return (directory / f"{_WORKING}-{rank}").exists()


def has_started(directory: Path, rank: int) -> bool:
    """Whether a rank has called :func:`note_start`."""
    return (directory / f"{_STARTED}-{rank}").exists()


def _code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return _USER_ERROR if isinstance(error, UserError) else 1


def _leave_to_launcher(error: BaseException) -> None:
    """Have Python not print what the launcher prints, if it ends this process."""
    print_error = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            print_error(kind, value, trace)

    sys.excepthook = hook


def first_report(directory: Path) -> Failure | None:
    """The failure that was written down first."""
    reports = _reports(directory)
    if not reports:
        return None
    first = min(reports, key=lambda report: report["time"])
    del first["time"], first["is_final"]
    return Failure(**first)


def final(directory: Path) -> list[int]:
    """Ranks that have written down a failure with which their processes end."""
    return [report["rank"] for report in _reports(directory) if report["is_final"]]


def _reports(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in directory.glob("rank-*.json")]


def _report(directory: Path, rank: int | str) -> Path:
    return directory / f"rank-{rank}.json"


def is_reported() -> bool:
    """Whether a launcher of ours shows this rank's failure, so that the rank need not.

    Not where the variables were inherited from a rank: nobody would show what its command says.
    """
    return _directory() is not None and os.environ.get(PARENT) == str(os.getppid())


def _directory() -> Path | None:
    """Where this rank writes down what ends it, for a launcher of ours."""
    name = os.environ.get(DIRECTORY)
    return Path(name) if name and PARENT in os.environ and Path(name).is_dir() else None


def describe(error: BaseException, prefix: str = "") -> str:
    """What to show of an error: one line a problem for the user's, a traceback for all others."""
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


def _is_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone: its cause is there, not here."""
    cause = stacks.root(error)
    if not isinstance(cause, RuntimeError):
        return False
    text = str(cause)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
    kinds = ("DistNetworkError", "DistStoreError", "HorovodInternalError")
    return type(cause).__name__ in kinds or any(sign in text for sign in signs)
