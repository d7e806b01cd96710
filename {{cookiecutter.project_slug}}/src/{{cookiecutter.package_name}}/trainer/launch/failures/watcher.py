"""Watches the ranks that this process has started, and ends them all when one fails."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .. import cluster, interruption, preemption
from ..cluster import Layout
from . import reports, watchdog
from .reports import Failure

# How long ranks may go on after they were told to end: the rest of a step, and a checkpoint.
SAVE_SECONDS = "TRAINER_SAVE_SECONDS"
_DEFAULT_SAVE_SECONDS = 120.0
_POLL_SECONDS = 0.05
_PREEMPTED = {128 + number for number in preemption.SIGNALS}


class Rank(Protocol):
    """A process that was started; its process group bears its id."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""


@dataclass(frozen=True)
class Place:
    """Where the ranks belong that a launcher starts on this node.

    ``directory``: where they write down their failures, and on one node meet; ``layout``: of the
    nodes, where this command was started once on each of them.
    """

    processes: int
    directory: Path
    layout: Layout = field(default_factory=Layout)

    @property
    def first_rank(self) -> int:
        """Of all ranks, the first one on this node."""
        return self.layout.node_rank * self.processes

    def variables(self, local_rank: int) -> dict[str, str]:
        """What a rank reads its place from, as torchrun would set it."""
        layout = self.layout
        variables = {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.processes * layout.num_nodes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": str(layout.node_rank),
            "GROUP_WORLD_SIZE": str(layout.num_nodes),
            "MASTER_ADDR": layout.main_address,
            # 0 on one node: nobody listens there.
            "MASTER_PORT": str(layout.main_port),
            # Between nodes rank 0 serves the store.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            # What the launcher was told to overlook is not for its ranks.
            cluster.OVERRIDE: "environment",
            watchdog.DIRECTORY: str(self.directory),
            reports.PARENT: str(os.getpid()),
            reports.RANK_PROCESS: "",  # each rank's own
        }
        if layout.num_nodes == 1:
            variables[cluster.STORE] = str(self.directory / "store")
        return variables


def threads_each(processes: int) -> str:
    """As torchrun does: n processes that each take every core are slower than one."""
    return str(max(1, (os.cpu_count() or 1) // processes))


class Watcher:
    """Starts ranks and waits for them; ends them all when one fails.

    Args:
        start: starts them, and gives them in their order.
        method: of multiprocessing, by which they are started.
        place: where they belong.
        grace_seconds: between SIGTERM and SIGKILL for the ranks that are left after a failure.
    """

    def __init__(
        self,
        start: Callable[[], Sequence[Rank]],
        method: str,
        place: Place,
        grace_seconds: float = 3.0,
    ) -> None:
        self._start = start
        self._method = method
        self._ranks: Sequence[Rank] = ()
        self._failures, self._first = place.directory, place.first_rank
        self._grace = grace_seconds
        self._asked_to_end: int | None = None
        self._asked_until = math.inf

    def watch(self) -> Failure | None:
        """Start the ranks, and wait until all have ended well, or one has not.

        SIGTERM, SIGUSR1, SIGHUP and SIGINT are handed on; a second SIGINT kills the ranks. Those
        that have not ended after ``TRAINER_SAVE_SECONDS`` (120) are ended.

        Returns:
            the first failure, of rank -1 where a signal has ended the run; ``None`` if there was
            none.
        """
        # Python takes handlers from the main thread alone; in another, signals are its business.
        is_main = threading.current_thread() is threading.main_thread()
        handed_on = [each for each in preemption.SIGNALS if not preemption.is_ignored(each)]
        handed_on = handed_on if is_main else []
        # SIGINT that comes while they are started is handed on when they are; those that have not
        # come to the trainer yet are ended by another signal.
        with preemption.children_deaf_to_interrupts(self._method):
            self._ranks = self._start()
            previous = {number: signal.signal(number, self._hand_on) for number in handed_on}
        try:
            while self._running() and time.monotonic() < self._asked_until:
                if any(rank.poll() not in (None, 0) for rank in self._ranks):
                    break
                if self._left() is not None or reports.final(self._failures):
                    break
                time.sleep(_POLL_SECONDS)
            return self._conclude()
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _hand_on(self, number: int, frame: object) -> None:
        if number == self._asked_to_end == signal.SIGINT:
            self._asked_until = -math.inf
            self._signal_all(signal.SIGKILL)
            return
        if number == signal.SIGHUP:
            preemption.leave_lost_terminal()
        self._asked_to_end = number
        seconds = float(os.environ.get(SAVE_SECONDS) or _DEFAULT_SAVE_SECONDS)
        self._asked_until = min(self._asked_until, time.monotonic() + seconds)
        for index, rank in enumerate(self._ranks, self._first):
            if rank.poll() is None:
                # Not their process groups: loader workers are still needed. One that is still
                # importing has nothing to save, and would print where SIGINT met it.
                heeds = number != signal.SIGINT or reports.has_started(self._failures, index)
                os.kill(rank.pid, number if heeds else signal.SIGTERM)

    def _conclude(self) -> Failure | None:
        codes = [rank.poll() for rank in self._ranks]
        if (left := self._left()) is not None and {0, None}.issuperset(codes):
            # Not by sys.exit, of which the rank would have told.
            return Failure(
                left,
                1,
                f"rank {left} ended with exit code 0 before its work was done: user code, or a "
                "library, called os._exit(0)",
            )
        if all(code == 0 for code in codes):
            return None
        if self._asked_to_end is not None or _PREEMPTED.intersection(codes):
            # Ranks that have saved end together: SIGINT leaves nothing else to wait for.
            seconds = self._grace if self._asked_to_end == signal.SIGINT else 30.0
            self._wait_all(min(seconds, self._asked_until - time.monotonic()))
            ended_by = self._ended_by()
            if ended_by is not None:
                return self._describe_end(ended_by)
        # Peers that fail of the same cause are given a moment to write down when.
        self._wait_all(seconds=0.5)
        self._wait_for_final()
        return self._first_failure()

    def _describe_end(self, number: int) -> Failure:
        if number != signal.SIGINT:
            return Failure(-1, 128 + number, f"ended by {signal.Signals(number).name}")
        found = reports.interrupted(self._failures)
        message = str(found or interruption.WORD)
        return Failure(-1, interruption.EXIT_CODE, message, interrupted=found)

    def _ended_by(self) -> int | None:
        """The signal that ended the ranks, at once or when they had saved; ``None``: none did."""
        if self._asked_to_end == signal.SIGINT or self._running():
            return self._asked_to_end
        codes = [rank.poll() for rank in self._ranks]
        return next((n for n in preemption.SIGNALS if {-n, 128 + n}.intersection(codes)), None)

    def _first_failure(self) -> Failure:
        # Before signals: NCCL aborts a rank whose peer has raised an error and gone.
        reported = reports.first_report(self._failures)
        if reported is not None:
            return reported
        codes = {
            n: code for n, rank in enumerate(self._ranks, self._first) if (code := rank.poll())
        }
        signals = {n: -code for n, code in codes.items() if code < 0}
        # For the same reason one that was killed otherwise comes before one that was aborted.
        for number in sorted(signals, key=lambda n: signals[n] == signal.SIGABRT):
            code = signals[number]
            return Failure(number, 128 + code, self._describe_kill(number, code))
        number, code = next(iter(codes.items()))
        return Failure(number, code, f"rank {number} exited with code {code}")

    def _describe_kill(self, rank: int, number: int) -> str:
        """Where a rank stood that a signal ended, and which signal."""
        name = signal.Signals(number).name
        lines = []
        if position := watchdog.fault(self._failures, rank):
            lines.append(f"rank {rank} stood at:\n{position}")
        if number == signal.SIGABRT:
            # So NCCL ends a rank that has waited too long for another, from a thread of its own.
            lines += self._positions()
        hint = "; if nobody sent it, memory ran out" if number == signal.SIGKILL else ""
        return "\n".join([*lines, f"rank {rank} was killed by {name}{hint}"])

    def _positions(self) -> list[str]:
        """Where the ranks stand that are alive."""
        return [
            f"rank {number} stands at:\n{watchdog.position(self._failures, number, rank.pid)}"
            for number, rank in enumerate(self._ranks, self._first)
            if rank.poll() is None
        ]

    def _end_all(self) -> None:
        self._signal_all(signal.SIGTERM)
        self._wait_all(self._grace)
        self._signal_all(signal.SIGKILL)
        self._wait_all(self._grace)

    def _signal_all(self, number: int) -> None:
        for rank in self._running():
            try:
                os.killpg(rank.pid, number)
            except ProcessLookupError:
                # It is still importing, and has no group of its own yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def _left(self) -> int | None:
        """A rank that has ended with code 0 in the midst of its work."""
        ended = (n for n, rank in enumerate(self._ranks) if rank.poll() == 0)
        return next((n for n in ended if reports.has_left(self._failures, n)), None)

    def _wait_for_final(self) -> None:
        """Leave ranks that have reported their failure a moment for what Python does at exit."""
        deadline = time.monotonic() + self._grace
        ending = [self._ranks[n - self._first] for n in reports.final(self._failures)]
        while any(rank.poll() is None for rank in ending) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.poll() is None]

    def _wait_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
