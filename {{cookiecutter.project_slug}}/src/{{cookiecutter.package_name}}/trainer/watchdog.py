"""Says which rank hangs and where it stands, when the others have lost it.

Each rank tells its siblings on the same node its process id, and prints the stacks of its threads
into a file when it is sent a signal: in C, so that it also does so while native code holds the
interpreter. Source: https://docs.python.org/3/library/faulthandler.html#faulthandler.register
"""

import faulthandler
import os
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path

from . import distributed

_DUMP = signal.SIGUSR2
_SECONDS_FOR_A_DUMP = 3.0
_SHOWN_LINES = 30
_PROC = Path("/proc/self")


@dataclass(frozen=True)
class _Sibling:
    rank: int
    host: str
    process: int
    started: str
    directory: str

    @property
    def stack(self) -> Path:
        return Path(self.directory) / "stack"

    @property
    def lost(self) -> Path:
        return Path(self.directory) / "lost"

    def state(self) -> str | None:
        """As the kernel writes it (``T`` is stopped); ``None`` if the process has ended."""
        status = _status(self.process)
        if status is None or status[1] != self.started or status[0] in "ZX":
            return None
        return status[0]


class Watchdog:
    """What a rank knows of its siblings on the same node."""

    def __init__(self) -> None:
        self._own: _Sibling | None = None
        self._file: TextIOWrapper | None = None
        self._siblings: list[_Sibling] = []

    def arm(self, failure_directory: str | None) -> None:
        """Tell the siblings of this process group where this rank is, and be ready to print stacks.

        Args:
            failure_directory: of the launcher, which removes it; otherwise a temporary one is made.
        """
        self.disarm()
        directory = tempfile.mkdtemp(prefix="trainer-rank-", dir=failure_directory)
        status = _status(os.getpid())
        started = status[1] if status is not None else ""
        own = _Sibling(distributed.rank(), _host(), os.getpid(), started, directory)
        self._own, self._file = own, own.stack.open("w")
        faulthandler.register(_DUMP, file=self._file, all_threads=True)
        told = [_Sibling(**each) for each in distributed.gather(asdict(own))]
        self._siblings = [each for each in told if each.host == own.host and each != own]

    def disarm(self) -> None:
        """Undo :meth:`arm`."""
        if self._own is not None and self._file is not None:
            faulthandler.unregister(_DUMP)
            self._file.close()
            shutil.rmtree(self._own.directory, ignore_errors=True)
        self._own, self._file, self._siblings = None, None, []

    def note_loss(self) -> None:
        """Tell the siblings that this rank has noticed: it is not the one that hangs."""
        if self._own is not None:
            self._own.lost.touch()

    def accuse(self) -> list[str]:
        """A text for each sibling on this node that has ended or hangs, with its stack."""
        lines = []
        for sibling in self._siblings:
            if sibling.lost.exists():
                continue
            who = f"rank {sibling.rank} (process {sibling.process})"
            state = sibling.state()
            if state is None:
                lines.append(f"{who} has ended")
            else:
                how = "is stopped" if state == "T" else "is alive"
                lines.append(f"{who} {how} and did not answer; it stands at:\n{_dump(sibling)}")
        return lines


watchdog = Watchdog()
"""This process'."""


def _dump(sibling: _Sibling) -> str:
    try:
        before = sibling.stack.stat().st_size
        os.kill(sibling.process, signal.SIGCONT)
        os.kill(sibling.process, _DUMP)
        deadline = time.monotonic() + _SECONDS_FOR_A_DUMP
        while sibling.stack.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        text = sibling.stack.read_text()[before:]
    except OSError as error:
        return f"  (unknown: {error.strerror})"
    # The thread that was asked stands last; it is the one that should have answered.
    _, mark, current = text.rpartition("Current thread")
    lines = (mark + current if mark else text).splitlines()[:_SHOWN_LINES]
    return "\n".join(lines) or "  (unknown: it does not even answer a signal)"


def _host() -> str:
    """This machine, and which of its containers: process ids mean the same in one only."""
    try:
        container = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        container = ""
    return f"{socket.gethostname()} {container}"


def _status(process: int) -> tuple[str, str] | None:
    """State and start time of a process; the time tells it from a later one of the same id."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None if _PROC.is_dir() else _status_by_signal(process)
    # Source: man 5 proc_pid_stat; the name in parentheses may hold spaces.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def _status_by_signal(process: int) -> tuple[str, str] | None:
    """What can be known where there is no /proc: whether such a process exists."""
    try:
        os.kill(process, 0)
    except OSError:
        return None
    return "?", ""
