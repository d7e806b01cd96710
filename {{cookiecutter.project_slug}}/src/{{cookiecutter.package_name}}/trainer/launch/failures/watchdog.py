"""Says where every rank stands when some have lost another: which one hangs, and in what.

Each rank tells its peers its process id, and of those on its own node it can learn the rest.
"""

import atexit
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from .. import collectives, files
from . import stacks

# Set by our launcher: where a rank tells of its failure.
DIRECTORY = "TRAINER_FAILURE_DIR"
_SECONDS_FOR_A_LAUNCHER = 3.0
_SECONDS_FOR_A_LOWER_RANK = 5.0
# Source: man 5 proc_pid_stat.
_STATES = {
    "R": "is running",
    "S": "waits",
    "D": "waits for a disk or a device",
    "T": "is stopped",
    "t": "is held by a debugger",
}
_STACK, _LOSS, _LEAVE = "stack", "loss", "leave"
_PROC = Path("/proc/self")


@dataclass(frozen=True)
class _Peer:
    rank: int
    host: str
    process: int
    started: str
    directory: str

    @property
    def stack(self) -> Path:
        """Where its stacks are printed."""
        return Path(self.directory) / _STACK

    @property
    def loss(self) -> Path:
        """Where it stood when it lost a peer."""
        return Path(self.directory) / _LOSS

    @property
    def leave(self) -> Path:
        """How it left the run by itself, and below that, where it stood."""
        return Path(self.directory) / _LEAVE

    def state(self) -> str | None:
        """As the kernel writes it (``T`` is stopped); ``None`` if the process has ended."""
        status = _status(self.process)
        if status is None or status[1] != self.started or status[0] in "ZX":
            return None
        return status[0]


class Watchdog:
    """What a rank knows of its peers."""

    def __init__(self) -> None:
        self._own: _Peer | None = None
        self._printer: stacks.Printer | None = None
        self._temporary: str | None = None
        self._peers: list[_Peer] = []
        self._elsewhere: list[_Peer] = []
        self._losses: dict[int, str] = {}

    @property
    def is_armed(self) -> bool:
        """Whether there are peers, and known."""
        return self._own is not None

    def arm(self) -> None:
        """Tell the peers of this process group where this rank is, and be ready to print stacks.

        What it tells lies in the directory of our launcher, which removes it; otherwise in
        torchelastic's, or in a temporary one that :meth:`disarm` removes.
        """
        self.disarm()
        if collectives.world_size() == 1:
            return
        rank, failure_directory = collectives.rank(), os.environ.get(DIRECTORY)
        directory = _directory(failure_directory or self._make_directory(), rank)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        status = _status(os.getpid())
        started = status[1] if status is not None else ""
        own = _Peer(rank, _host(), os.getpid(), started, str(directory))
        self._own = own
        self._printer = stacks.Printer(own.stack, fatal_too=failure_directory is not None)
        told = [_Peer(**each) for each in collectives.gather(asdict(own))]
        self._peers = [each for each in told if each.host == own.host and each != own]
        self._elsewhere = [each for each in told if each.host != own.host]

    def _make_directory(self) -> str:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            return str(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent)
        self._temporary = tempfile.mkdtemp(prefix="trainer-rank-")
        return self._temporary

    def disarm(self) -> None:
        """Undo :meth:`arm`."""
        if self._printer is not None:
            self._printer.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._own, self._printer, self._temporary = None, None, None
        self._peers, self._elsewhere, self._losses = [], [], {}

    def note_loss(self, position: str) -> None:
        """Tell the peers that this rank has noticed, and where: it is not the one that hangs."""
        if self._own is not None:
            self._losses[self._own.rank] = position
            files.write_atomically(self._own.loss, position)

    def note_leave(self, words: str, error: BaseException) -> None:
        """Tell the peers that this rank leaves the run by itself, in words, and where."""
        if self._own is not None:
            files.write_atomically(self._own.leave, f"{words}\n{stacks.of_error(error)}")

    def wait_to_be_ended(self, seconds: float) -> None:
        """Give a launcher time to end this rank, and the peers time to notice the loss too.

        Args:
            seconds: to wait. A peer that has ended shortens it: a launcher has seen that too, or
                does not act on it. A lower rank that will speak for this one lengthens it.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(each.state() is None for each in self._silent()):
                deadline = min(deadline, time.monotonic() + _SECONDS_FOR_A_LAUNCHER)
            time.sleep(0.1)
        self._silent()
        if self._own is not None and min(self._losses) < self._own.rank:
            time.sleep(_SECONDS_FOR_A_LOWER_RANK)

    def accuse(self, reason: str) -> str | None:
        """Where each rank on this node stands, and in the last line, which have been lost.

        Args:
            reason: what the backend said.

        Returns:
            ``None`` if no peer here is to blame.
        """
        silent = self._silent()
        if not silent:
            return None
        waiting: dict[str, list[int]] = {}
        for rank, position in sorted(self._losses.items()):
            waiting.setdefault(position, []).append(rank)
        told = [f"{_names(ranks)} waited at:\n{position}" for position, ranks in waiting.items()]
        looks = [_look_at(each) for each in silent]
        told += [look.told for look in looks if look.told]
        # A rank that came later to where all wait has not waited long enough to notice.
        fates = [look.fate for look in looks if not look.waits_too] or [look.fate for look in looks]
        waited = f"{_names(sorted(self._losses))} waited in vain ({reason})"
        return "\n".join([*told, f"{', '.join(fates)}: {waited}"])

    def end_silent_at_exit(self) -> None:
        """Have the peers here that have not noticed killed, once this rank has told all.

        They hang, and may not heed what a launcher sends them first.
        """
        atexit.register(_end, self._silent())

    def elsewhere(self) -> str | None:
        """Where to look if no rank on this node hangs; ``None`` if all are on this one."""
        nodes = sorted({each.host.partition(" ")[0] for each in self._elsewhere})
        return f"no rank on this node hangs: look at {_listed(nodes)}" if nodes else None

    def _silent(self) -> list[_Peer]:
        """Those that have not noticed that anybody is lost."""
        for peer in self._peers:
            # Remembered: a peer that has ended since may have taken its file along.
            if peer.rank not in self._losses and (position := _read(peer.loss)):
                self._losses[peer.rank] = position
        return [each for each in self._peers if each.rank not in self._losses]


watchdog = Watchdog()
"""This process'."""


def fault(base: Path, rank: int) -> str:
    """Where a rank stood when a fault ended it, for the launcher whose directory is given.

    Empty if it has not told.
    """
    return stacks.of_fault(_directory(base, rank) / _STACK)


def position(base: Path, rank: int, process: int) -> str:
    """Where a rank that is alive stands, for the launcher whose directory is given."""
    directory = _directory(base, rank)
    return _read(directory / _LOSS) or stacks.ask(process, directory / _STACK)


def _directory(base: str | Path, rank: int) -> Path:
    """Where a rank keeps what it tells."""
    return Path(base) / f"rank-{rank}"


def _end(peers: Sequence[_Peer]) -> None:
    for each in peers:
        if each.state() is not None:
            with contextlib.suppress(OSError):
                os.kill(each.process, signal.SIGKILL)


class _Look(NamedTuple):
    """What has become of a peer.

    ``told``: where it stands or stood, if that is known; ``waits_too``: for another, it seems.
    """

    fate: str
    told: str
    waits_too: bool


def _look_at(peer: _Peer) -> _Look:
    name = f"rank {peer.rank}"
    if left := _read(peer.leave):
        fate, _, position = left.partition("\n")
        return _Look(f"{name} {fate}", f"{name} {fate}, at:\n{position}", False)
    state = peer.state()
    if state is None:
        return _Look(f"{name} has ended", "", False)
    position = stacks.ask(peer.process, peer.stack)
    what = f"{name} (process {peer.process}) {_STATES.get(state, 'is alive')}"
    on_gpu = torch.cuda.is_initialized()  # here, and so there
    waits_too = state not in "Tt" and stacks.is_in_collective(position, on_gpu)
    return _Look(f"{name} hangs", f"{what}, at:\n{position}", waits_too)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed([str(rank) for rank in ranks])}"


def _listed(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


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
