"""What a rank says of its failure, so that the first one is shown and not the last."""

import json
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..watchdog import watchdog

DIRECTORY = "TRAINER_FAILURE_DIR"
# How long a rank that only lost its sibling waits to be ended before it tells of its own loss.
_YIELD_SECONDS = 8.0
_USER_ERROR = 2


class RankError(RuntimeError):
    """A rank that this process started has failed; its text is all that is worth showing."""


@dataclass(frozen=True)
class Failure:
    """What ended a run: the rank that failed first, its exit code, and what to show."""

    rank: int
    code: int
    message: str

    @property
    def is_user_error(self) -> bool:
        """Whether it is a mistake of the user's, which needs no traceback."""
        return self.code == _USER_ERROR

    @property
    def lines(self) -> list[str]:
        """The message's lines, without the words that say what they are."""
        prefix = f"rank {self.rank}: error: "
        return [line.removeprefix(prefix) for line in self.message.splitlines()]


def report_failure(error: BaseException) -> None:
    """Write down a rank's failure for its launcher: ours, or torchelastic's.

    A rank that only lost a sibling first waits to be ended, so that the sibling's error stands
    alone. If nothing ends it, the sibling hangs: then its stack is added.
    """
    if isinstance(error, SystemExit | KeyboardInterrupt) or "RANK" not in os.environ:
        return
    if _is_lost_sibling(error):
        watchdog.note_loss()
        time.sleep(_YIELD_SECONDS)
        for line in watchdog.accuse():
            error.add_note(line)
    if directory := os.environ.get(DIRECTORY):
        _write(Path(directory), int(os.environ["RANK"]), error)
    elif "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)


def _write(directory: Path, rank: int, error: BaseException) -> None:
    report = {
        "rank": rank,
        "time": time.time(),
        "code": _USER_ERROR if isinstance(error, UserError) else 1,
        "message": describe(error, f"rank {rank}: "),
    }
    beside = directory / f".rank-{rank}"
    beside.write_text(json.dumps(report))
    beside.replace(directory / f"rank-{rank}.json")


def first_report(directory: Path) -> Failure | None:
    """The failure that was written down first."""
    reports = [json.loads(path.read_text()) for path in directory.glob("rank-*.json")]
    if not reports:
        return None
    first = min(reports, key=lambda report: report["time"])
    return Failure(first["rank"], first["code"], first["message"])


def is_reported() -> bool:
    """Whether a launcher of ours shows this rank's failure, so that the rank need not."""
    return DIRECTORY in os.environ


def describe(error: BaseException, prefix: str = "") -> str:
    """What to show of an error: one line a problem for the user's, a traceback for all others."""
    if isinstance(error, UserError):
        return "\n".join(f"{prefix}error: {line}" for line in error.problems)
    if isinstance(error, RankError):
        return str(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    return f"{text}\n{prefix}{type(error).__name__}: {error}" if prefix else text


def _is_lost_sibling(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone: its cause is there, not here."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
    kinds = ("DistNetworkError", "DistStoreError", "HorovodInternalError")
    return type(error).__name__ in kinds or any(sign in text for sign in signs)
