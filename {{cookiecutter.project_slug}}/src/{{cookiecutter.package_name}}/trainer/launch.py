"""How the processes of a run come to be: they are there already, or this one starts them."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from . import rendezvous
from .errors import UserError

Result = TypeVar("Result")

_FAILURES = "TRAINER_FAILURE_DIR"
_PARENT = "TRAINER_PARENT_PID"
_POLL_SECONDS = 0.05
# How long a rank that only lost its sibling waits to be ended before it tells of its own loss.
_YIELD_SECONDS = 8.0
_USER_ERROR = 2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HANDED_ON = (signal.SIGTERM, signal.SIGINT)


def run_external(run: Callable[[], Result]) -> Result:
    """Run as one rank of several that something outside has started, or as the only one.

    A failure is written where the launcher looks for it, so that the first rank's is shown.
    """
    _die_with_parent()
    try:
        return run()
    except BaseException as error:
        report_failure(error)
        raise


def supervise_copies(processes: int, grace_seconds: float = 3.0) -> NoReturn:
    """Start this same command once a rank, watch the ranks, and end as they end.

    When one fails, the others are ended and the first failure is shown; its exit code becomes
    this process'. SIGTERM and SIGINT are handed on.

    Args:
        processes: ranks to start on this node.
        grace_seconds: between SIGTERM and SIGKILL for the ranks that are left after a failure.

    Raises:
        UserError: there is no command that could be started again.
    """
    arguments = sys.orig_argv[1:]
    if not arguments or hasattr(sys, "ps1"):
        raise UserError(
            "an interactive session has no command that could be started once a rank; "
            "write a script, or use torchrun"
        )
    store = rendezvous.loopback_store()
    with tempfile.TemporaryDirectory(prefix="trainer-failures-") as directory:
        ranks = [
            _start([sys.executable, *arguments], rank, processes, store.port, directory)
            for rank in range(processes)
        ]
        code = _Watcher(ranks, Path(directory), grace_seconds).watch()
    sys.exit(code)


def _start(
    command: list[str], rank: int, processes: int, port: int, failures: str
) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _FAILURES: failures,
        _PARENT: str(os.getpid()),
    }
    # As torchrun does: n processes that each take every core are slower than one.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    # A process group of its own, so that a rank's loader workers are ended with it.
    return subprocess.Popen(command, env=environment, process_group=0)


@dataclass(frozen=True)
class _Failure:
    rank: int
    code: int
    message: str


class _Watcher:
    """Waits for ranks; ends them all when one fails."""

    def __init__(
        self, ranks: "list[subprocess.Popen[bytes]]", failures: Path, grace_seconds: float
    ) -> None:
        self._ranks = ranks
        self._failures = failures
        self._grace = grace_seconds
        self._asked_to_end: int | None = None

    def watch(self) -> int:
        """Wait until all have ended; the exit code of the run."""
        previous = {number: signal.signal(number, self._hand_on) for number in _HANDED_ON}
        try:
            while any(rank.poll() is None for rank in self._ranks):
                if any(rank.poll() not in (None, 0) for rank in self._ranks):
                    break
                time.sleep(_POLL_SECONDS)
            return self._conclude()
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _hand_on(self, number: int, frame: object) -> None:
        self._asked_to_end = number
        self._signal_all(number)

    def _conclude(self) -> int:
        codes = [rank.poll() for rank in self._ranks]
        if all(code == 0 for code in codes):
            return 0
        if self._asked_to_end is not None:
            self._wait_all(seconds=30.0)
            return 128 + self._asked_to_end
        # Siblings that fail of the same cause are given a moment to write down when.
        self._wait_all(seconds=0.5)
        failure = self._first_failure()
        self._end_all()
        print(failure.message, file=sys.stderr, flush=True)
        return failure.code

    def _first_failure(self) -> _Failure:
        for rank, process in enumerate(self._ranks):
            code = process.poll()
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                return _Failure(rank, 128 - code, f"rank {rank} was killed by {name}")
        reports = [json.loads(path.read_text()) for path in self._failures.glob("rank-*.json")]
        if reports:
            first = min(reports, key=lambda report: report["time"])
            return _Failure(first["rank"], first["code"], first["message"])
        rank, code = next((r, p.returncode) for r, p in enumerate(self._ranks) if p.returncode)
        return _Failure(rank, code, f"rank {rank} exited with code {code}")

    def _end_all(self) -> None:
        self._signal_all(signal.SIGTERM)
        self._wait_all(self._grace)
        self._signal_all(signal.SIGKILL)
        self._wait_all(self._grace)

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, number)

    def _wait_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _die_with_parent() -> None:
    """Have the kernel end this rank when the process that started it is gone, even by SIGKILL."""
    parent = os.environ.get(_PARENT)
    if parent is None or os.getppid() not in (int(parent), 1):
        return  # not a rank that we started; perhaps a child of one, with its variables
    if sys.platform == "linux":
        # Not a thread that watches: it could not run while native code holds the interpreter.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank is gone")


def report_failure(error: BaseException) -> None:
    """Write down a rank's failure for its launcher: ours, or torchelastic's.

    A rank that only lost a sibling first waits to be ended, so that the sibling's error stands
    alone.
    """
    if isinstance(error, SystemExit | KeyboardInterrupt) or "RANK" not in os.environ:
        return
    if _is_lost_sibling(error):
        time.sleep(_YIELD_SECONDS)
    if directory := os.environ.get(_FAILURES):
        rank = int(os.environ["RANK"])
        report = {
            "rank": rank,
            "time": time.time(),
            "code": _USER_ERROR if isinstance(error, UserError) else 1,
            "message": describe(error, f"rank {rank}: "),
        }
        beside = Path(directory) / f".rank-{rank}"
        beside.write_text(json.dumps(report))
        beside.replace(Path(directory) / f"rank-{rank}.json")
    elif "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)


def is_reported() -> bool:
    """Whether a launcher of ours shows this rank's failure, so that the rank need not."""
    return _FAILURES in os.environ


def describe(error: BaseException, prefix: str = "") -> str:
    """What to show of an error: one line a problem for the user's, a traceback for all others."""
    if isinstance(error, UserError):
        return "\n".join(f"{prefix}error: {line}" for line in error.problems)
    text = "".join(traceback.format_exception(error)).rstrip()
    return f"{text}\n{prefix}{type(error).__name__}: {error}" if prefix else text


def _is_lost_sibling(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone: its cause is there, not here."""
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
    return type(error).__name__ == "DistNetworkError" or any(sign in text for sign in signs)
