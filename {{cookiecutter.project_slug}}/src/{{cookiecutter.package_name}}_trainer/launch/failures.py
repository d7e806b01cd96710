"""Why a rank failed: its report for the launcher, and the words that describe it.

Not torchelastic's error files: by their times in whole seconds, the first failure cannot be told.
"""

import atexit
import contextlib
import errno
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection, queues
from pathlib import Path
from typing import NoReturn

from torch.utils.data import dataloader

from ..errors import DISK, EarlyExit, UserError, lost_worker
from ..options import redaction
from . import collectives, files, hangs, output, reports, signals

# How long a rank that only lost a peer waits for a peer to fail, and for one that has to end.
_SECONDS_FOR_PEER, _SECONDS_TO_END = 8.0, 60.0
_POLL_SECONDS, _SECONDS_AT_EXIT, _SECONDS_FOR_SIGCHLD = 0.1, 5.0, 2.0
_INTERRUPTED = "interrupted.json"
_TORCHELASTIC_FILE = "TORCHELASTIC_ERROR_FILE"
_LOST_A_PEER = "lost-a-peer"
_TRAINER = Path(__file__).parents[1]
_LIBRARY = Path(os.__file__).parent
_PYTHON = ("<frozen os>", *(f"{_LIBRARY}/{name}" for name in ("os", "pathlib", "shutil")))
_TOO_MANY = "Too many open files"
_LOST = ("closed by peer", "reset by peer", "pair closure", "Broken pipe", "gloo", "NCCL")

keep_error: Callable[[BaseException, int], object] | None = None
"""Keeps the error of a rank for the process that has started it; set by the launcher."""


class RankError(RuntimeError):
    """A rank other than this process failed; the message is all that is worth showing."""


@dataclass(frozen=True)
class Failure:
    rank: int
    code: int
    message: str
    problems: Sequence[str] = ()  # of a ``UserError``, which is shown without a traceback
    time: float = 0.0
    reason: str = ""  # the first sentence of an error that only reports a lost peer
    lost_at: str = ""  # the stack where the rank lost a peer; empty for other errors
    interrupted: signals.Interrupted | None = None  # by SIGINT, if the ranks saved a checkpoint


def report_failure(error: BaseException, lost_peer: Sequence[str] = ()) -> str:
    """Write a rank's failure report for its launcher; return what to print of a lost peer."""
    hangs.timer.pause()
    directory, rank = reports.launcher_directory(), reports.own_rank()
    is_ours = reports.is_reported()
    if isinstance(error, signals.Interrupted) and rank == 0 and directory:
        saved = [error.step, error.directory, error.is_command]
        files.write_atomically(directory / _INTERRUPTED, json.dumps(saved))
    is_requested = isinstance(error, KeyboardInterrupt | signals.Preempted)
    if is_requested or (isinstance(error, SystemExit) and not error.code):
        return ""
    is_lost = collectives.world_size() > 1 and is_lost_peer(error, lost_peer)
    if is_lost and not is_ours:
        _let_peers_end_first()
    message = _of_lost_peer(error) if is_lost else describe(error, f"rank {rank}: ")
    if not (is_lost and is_ours):  # our launcher knows which peer was lost
        reports.write_failed(message)
    if directory:
        problems = error.problems if isinstance(error, UserError) else ()
        problems = [redaction.message(problem) for problem in problems]
        code, lost_at = reports.exit_code(error), hangs.of_error(error) if is_lost else ""
        failure = Failure(rank, code, message, problems, time.time(), reason(error), lost_at)
        files.write_first(directory / f"rank-{rank}.json", json.dumps(asdict(failure)))
        if keep_error is not None:
            keep_error(error, rank)
        signals.hide_traceback(error)
    elif file := os.environ.get(_TORCHELASTIC_FILE):
        # The format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
        more = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": more}}
        files.write_atomically(Path(file), json.dumps(report))
    return message if is_lost else ""


def _let_peers_end_first() -> None:
    """Wait, or be ended: torchrun shows the failures of the ranks that have ended first.

    A rank closes its connections before it ends, which may take long on a busy machine.
    """
    began, seconds = time.monotonic(), _SECONDS_FOR_PEER
    if file := os.environ.get(_TORCHELASTIC_FILE):
        Path(file).with_name(_LOST_A_PEER).touch()
    while time.monotonic() - began < seconds:
        time.sleep(_POLL_SECONDS)
        failed = Path(file).parents[1].glob(f"*/{Path(file).name}") if file else ()
        if any(not report.with_name(_LOST_A_PEER).exists() for report in failed):
            seconds = _SECONDS_TO_END


def exit_after_failure(error: BaseException, lost_peer: Sequence[str] = ()) -> NoReturn:
    """Report a rank's failure and end its process without destroying its process group.

    With NCCL, that would wait for peers, which wait for this rank.
    """
    lost = report_failure(error, lost_peer)
    if not reports.is_reported():
        output.print_lines(lost or describe(error, f"rank {reports.own_rank()}: "), error=True)
    at_exit = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    at_exit.start()
    at_exit.join(_SECONDS_AT_EXIT)
    with contextlib.suppress(OSError, ValueError):  # closed, or the terminal is gone
        output.flush(sys.stdout)
        output.flush(sys.stderr)
    os._exit(reports.exit_code(error) or 1)


def failures(directory: Path) -> list[Failure]:
    """The reported failures, the first one first."""
    read = [json.loads(path.read_text("utf-8")) for path in directory.glob("rank-*.json")]
    return sorted((Failure(**report) for report in read), key=lambda failure: failure.time)


def interrupted(directory: Path) -> signals.Interrupted | None:
    """Read rank 0's record of an interrupt; ``None`` if the ranks did not save a checkpoint."""
    path = directory / _INTERRUPTED
    return signals.Interrupted(*json.loads(path.read_text("utf-8"))) if path.exists() else None


def describe(error: BaseException, prefix: str = "") -> str:
    """Format an error without secrets: a line per problem of a ``UserError``, or the traceback."""
    if isinstance(error, UserError | EarlyExit):
        lines = error.problems if isinstance(error, UserError) else [str(error)]
        text = "\n".join(f"{prefix}error: {line}" for line in lines)
    elif isinstance(error, RankError):
        text = str(error)
    elif isinstance(error, SystemExit):
        text = f"{hangs.of_error(error)}\n{prefix}sys.exit({error.code!r}) was called"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
        text += f"\n{prefix}{type(error).__name__}: {error}" if prefix else ""
    return redaction.message(text)


def is_lost_peer(error: BaseException, kinds: Sequence[str] = ()) -> bool:
    """Whether an error only reports a lost peer: the cause is in the peer, not here."""
    cause = hangs.root(error)
    kinds = ("DistNetworkError", "DistStoreError", *kinds)
    return isinstance(cause, RuntimeError) and (
        type(cause).__name__ in kinds or any(sign in str(cause) for sign in _LOST)
    )


def _of_lost_peer(error: BaseException) -> str:
    """The stack at which a rank lost a peer, and one line."""
    line = (
        f"rank {reports.own_rank()} lost a peer ({reason(error)}): another rank ended or hangs, "
        "or the network between them failed; see docs/trouble.md#a-peer-was-lost"
    )
    stack = hangs.of_error(error)
    return redaction.message(f"{stack}\n{line}{hangs.advice([stack])}")


def reason(error: BaseException) -> str:
    """The first sentence of an error of gloo, NCCL or the store, without its C++ location."""
    text = re.sub(r"^\[[^]]*\]\s*", "", str(hangs.root(error)).strip())
    return re.split(r"\.\s|\n", text, maxsplit=1)[0][:200]


def failure_of_machine(error: BaseException, directory: Path) -> str | None:
    """One line for a disk that fails, or a loader's worker that was killed; else ``None``."""
    if getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE) or _TOO_MANY in str(error):
        return f"{_TOO_MANY}: raise the limit (ulimit -n 65536), or lower the loaders' num_workers"
    if isinstance(error, OSError) and error.strerror:
        frames = traceback.extract_tb(error.__traceback__)
        if frames[-1].filename == f"{_LIBRARY}/multiprocessing/synchronize.py":
            line = "no semaphore can be made in /dev/shm (in Docker: --shm-size=8g)"
            return f"{error.strerror}: {line}; mount it, or use num_workers=0"
        # Not Python's own, which open, rename and remove for their caller.
        last = [frame for frame in frames if not frame.filename.startswith(_PYTHON)][-1]
        is_ours = Path(last.filename).is_relative_to(_TRAINER)
        if is_ours or error.errno in DISK:
            place = directory if is_ours else f"{last.filename}, line {last.lineno}"
            return f"{error.strerror}: {error.filename or place}"
    if not (worker := lost_worker(error) or _unreachable_worker(error)):
        return None
    remedy = "give the loader fewer num_workers; see docs/trouble.md#a-loader-worker-was-killed"
    if "Bus error" in worker:
        return f"{worker}: /dev/shm is full (in Docker: --shm-size=8g); {remedy}"
    return f"{worker}; if nobody killed it, memory ran out: {remedy}"


def _unreachable_worker(error: BaseException) -> str:
    """Describe a loader's worker that broke its connection before torch saw that it had exited."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    is_lost = isinstance(error, (ConnectionError, EOFError))
    is_received = {dataloader.__file__, queues.__file__} <= {*files}
    if not (is_lost and is_received and files[-1] == connection.__file__):
        return ""
    try:
        time.sleep(_SECONDS_FOR_SIGCHLD)  # its handler raises an error that says how it ended
    except RuntimeError as raised:
        return lost_worker(raised)
    return "DataLoader worker exited unexpectedly"
