"""Report the stack of every rank when a peer is lost: which rank hangs, and in what call.

Each rank publishes its process id to its peers; peers on the same node can inspect the process.
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

# Set by our launcher: the directory for failure reports.
DIRECTORY = "TRAINER_FAILURE_DIR"
_SECONDS_FOR_A_LAUNCHER = 3.0
_SECONDS_FOR_A_LOWER_RANK = 5.0
# Source: man 5 proc_pid_stat.
_STATES = {
    "R": "is running",
    "S": "waits",
    "D": "waits for a disk or a device",
    "T": "is stopped",
    "t": "is stopped by a debugger",
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
        """The file of its stacks."""
        return Path(self.directory) / _STACK

    @property
    def loss(self) -> Path:
        """The file of its stack when it lost a peer."""
        return Path(self.directory) / _LOSS

    @property
    def leave(self) -> Path:
        """The file that says how it left the run by itself, with its stack."""
        return Path(self.directory) / _LEAVE

    def state(self) -> str | None:
        """The kernel's process state (``T`` is stopped); ``None`` if the process has ended."""
        status = _status(self.process)
        if status is None or status[1] != self.started or status[0] in "ZX":
            return None
        return status[0]


class Watchdog:
    """What a rank knows about its peers."""

    def __init__(self) -> None:
        self._own: _Peer | None = None
        self._printer: stacks.Printer | None = None
        self._temporary: str | None = None
        self._peers: list[_Peer] = []
        self._peers_on_other_nodes: list[_Peer] = []
        self._losses: dict[int, str] = {}

    @property
    def is_armed(self) -> bool:
        """Whether peers exist and are known."""
        return self._own is not None

    def arm(self) -> None:
        """Exchange process ids with the peers of this process group, and prepare to print stacks.

        The files are in our launcher's directory, which the launcher removes; otherwise in
        torchelastic's directory, or in a temporary one that :meth:`disarm` removes.
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
        lines = [_Peer(**each) for each in collectives.gather(asdict(own))]
        self._peers = [each for each in lines if each.host == own.host and each != own]
        self._peers_on_other_nodes = [each for each in lines if each.host != own.host]

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
        self._peers, self._peers_on_other_nodes, self._losses = [], [], {}

    def record_loss(self, position: str) -> None:
        """Record this rank's stack when it lost a peer: it is not the rank that hangs."""
        if self._own is not None:
            self._losses[self._own.rank] = position
            files.write_atomically(self._own.loss, position)

    def record_exit(self, words: str, error: BaseException) -> None:
        """Record for the peers why this rank leaves the run, and its stack."""
        if self._own is not None:
            files.write_atomically(self._own.leave, f"{words}\n{stacks.of_error(error)}")

    def wait_for_termination(self, seconds: float) -> None:
        """Wait for a launcher to terminate this rank, and for peers to notice the loss.

        Args:
            seconds: Time to wait. Shorter if a peer has ended: a launcher has seen that too, or
                does not act on it. Longer if a lower rank will report for this one.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(each.state() is None for each in self._silent_peers()):
                deadline = min(deadline, time.monotonic() + _SECONDS_FOR_A_LAUNCHER)
            time.sleep(0.1)
        self._silent_peers()
        if self._own is not None and min(self._losses) < self._own.rank:
            time.sleep(_SECONDS_FOR_A_LOWER_RANK)

    def describe_hang(self, reason: str) -> str | None:
        """Describe the stack of each rank on this node, and in the last line the lost ranks.

        Args:
            reason: The backend's error.

        Returns:
            The description; ``None`` if no peer on this node is lost.
        """
        silent = self._silent_peers()
        if not silent:
            return None
        waiting: dict[str, list[int]] = {}
        for rank, position in sorted(self._losses.items()):
            waiting.setdefault(position, []).append(rank)
        lines = [f"{_names(ranks)} waited at:\n{position}" for position, ranks in waiting.items()]
        states = [_inspect(each) for each in silent]
        lines += [state.details for state in states if state.details]
        # A rank that entered the collective late has not waited long enough to notice the loss.
        lost = [state for state in states if not state.is_waiting] or states
        waited = f"{_names(sorted(self._losses))} timed out ({reason})"
        return "\n".join([*lines, f"{', '.join(state.summary for state in lost)}: {waited}"])

    def kill_hung_peers_at_exit(self) -> None:
        """Kill the peers on this node that have not noticed the loss when this process exits.

        They hang, and may not react to the signal that a launcher sends first.
        """
        atexit.register(_end, self._silent_peers())

    def other_nodes_hint(self) -> str | None:
        """Names the other nodes, if no rank on this node hangs; ``None`` if there are none."""
        nodes = sorted({each.host.partition(" ")[0] for each in self._peers_on_other_nodes})
        return f"no rank on this node hangs: look at {_listed(nodes)}" if nodes else None

    def _silent_peers(self) -> list[_Peer]:
        """Peers on this node that have not recorded a loss."""
        for peer in self._peers:
            # Remember it: a peer that has ended may have removed its file.
            if peer.rank not in self._losses and (position := _read(peer.loss)):
                self._losses[peer.rank] = position
        return [each for each in self._peers if each.rank not in self._losses]


process_watchdog = Watchdog()
"""The watchdog of this process."""


def fault(base: Path, rank: int) -> str:
    """Stack of a rank when a fatal error ended it, for the launcher with this directory.

    Empty if the rank wrote none.
    """
    return stacks.of_fault(_directory(base, rank) / _STACK)


def position(base: Path, rank: int, process: int) -> str:
    """Stack of a running rank, for the launcher with this directory."""
    directory = _directory(base, rank)
    return _read(directory / _LOSS) or stacks.request(process, directory / _STACK)


def _directory(base: str | Path, rank: int) -> Path:
    """Directory of a rank's files."""
    return Path(base) / f"rank-{rank}"


def _end(peers: Sequence[_Peer]) -> None:
    for each in peers:
        if each.state() is not None:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(each.process, signal.SIGKILL)


class _PeerState(NamedTuple):
    """The state of a peer.

    ``details``: its stack, if known; ``is_waiting``: whether it seems to wait for another rank.
    """

    summary: str
    details: str
    is_waiting: bool


def _inspect(peer: _Peer) -> _PeerState:
    name = f"rank {peer.rank}"
    if left := _read(peer.leave):
        summary, _, position = left.partition("\n")
        return _PeerState(f"{name} {summary}", f"{name} {summary}, at:\n{position}", False)
    state = peer.state()
    if state is None:
        return _PeerState(f"{name} has ended", "", False)
    position = stacks.request(peer.process, peer.stack)
    what = f"{name} (process {peer.process}) {_STATES.get(state, 'is alive')}"
    on_gpu = torch.cuda.is_initialized()  # the peer uses the same kind of device
    is_waiting = state not in "Tt" and stacks.is_in_collective(position, on_gpu)
    return _PeerState(f"{name} hangs", f"{what}, at:\n{position}", is_waiting)


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
    """Host name and PID namespace: process ids are unique only within a namespace."""
    try:
        container = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        container = ""
    return f"{socket.gethostname()} {container}"


def _status(process: int) -> tuple[str, str] | None:
    """State and start time of a process; the time distinguishes processes that reuse an id."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None if _PROC.is_dir() else _status_by_signal(process)
    # Source: man 5 proc_pid_stat; the name in parentheses may hold spaces.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def _status_by_signal(process: int) -> tuple[str, str] | None:
    """Like :func:`_status` without /proc: only whether the process exists."""
    try:
        os.kill(process, 0)
    except OSError:
        return None
    return "?", ""
