"""Monitor the ranks that this process has started, and terminate all when one fails."""

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

# How long ranks may run after a signal, to finish the step and save a checkpoint.
SAVE_SECONDS = "TRAINER_SAVE_SECONDS"
_DEFAULT_SAVE_SECONDS = 120.0
_POLL_SECONDS = 0.05
_PREEMPTED = {128 + number for number in preemption.SIGNALS}


class Rank(Protocol):
    """A started process; the id of its process group is its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, negative for a signal; ``None`` while it runs."""


@dataclass(frozen=True)
class Place:
    """The ranks that a launcher starts on this node.

    ``directory``: for failure reports, and for the store if there is one node; ``layout``: of the
    nodes, where this command was started once per node.
    """

    processes: int
    directory: Path
    layout: Layout = field(default_factory=Layout)

    @property
    def first_rank(self) -> int:
        """The global rank of the first process on this node."""
        return self.layout.node_rank * self.processes

    def variables(self, local_rank: int) -> dict[str, str]:
        """Environment variables of a rank, named as torchrun names them."""
        layout = self.layout
        variables = {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.processes * layout.num_nodes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": str(layout.node_rank),
            "GROUP_WORLD_SIZE": str(layout.num_nodes),
            "MASTER_ADDR": layout.main_address,
            # 0 on one node: no TCP store is used.
            "MASTER_PORT": str(layout.main_port),
            # With several nodes, rank 0 serves the store.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            # The launcher's own override is not meant for its ranks.
            cluster.OVERRIDE: "environment",
            watchdog.DIRECTORY: str(self.directory),
            reports.PARENT: str(os.getpid()),
            reports.RANK_PROCESS: "",  # each rank's own
        }
        if layout.num_nodes == 1:
            variables[cluster.STORE] = str(self.directory / cluster.STORE_FILE)
        return variables


def threads_each(processes: int) -> str:
    """Threads per process, as in torchrun: processes that each use every core slow down."""
    return str(max(1, (os.cpu_count() or 1) // processes))


class Watcher:
    """Starts ranks and waits for them; terminates all ranks when one fails.

    Args:
        start: Starts the ranks and returns them in rank order.
        method: The multiprocessing start method.
        place: The ranks to start.
        grace_seconds: Time between SIGTERM and SIGKILL for the remaining ranks after a failure.
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
        self._forwarded_signal: int | None = None
        self._deadline = math.inf

    def watch(self) -> Failure | None:
        """Start the ranks and wait until all have succeeded or one has failed.

        SIGTERM, SIGUSR1, SIGHUP and SIGINT are forwarded; a second SIGINT kills the ranks. Ranks
        that have not ended after ``TRAINER_SAVE_SECONDS`` (120) are terminated.

        Returns:
            The first failure, with rank -1 if a signal ended the run; ``None`` on success.
        """
        # Python accepts signal handlers only in the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        forwarded = [each for each in preemption.SIGNALS if not preemption.is_ignored(each)]
        forwarded = forwarded if is_main else []
        # A SIGINT during the start is forwarded afterward. Ranks that have not yet reached the
        # trainer are ended by another signal.
        with preemption.block_sigint_in_children(self._method):
            self._ranks = self._start()
            previous = {number: signal.signal(number, self._forward) for number in forwarded}
        try:
            while None in (codes := self._codes().values()) and time.monotonic() < self._deadline:
                if any(code not in (None, 0) for code in codes):
                    break
                if self._ended_early() is not None or reports.final(self._failures):
                    break
                time.sleep(_POLL_SECONDS)
            return self._conclude()
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: object) -> None:
        if number == self._forwarded_signal == signal.SIGINT:
            self._deadline = -math.inf
            self._signal_all(signal.SIGKILL)
            return
        if number == signal.SIGHUP:
            preemption.redirect_lost_terminal()
        self._forwarded_signal = number
        seconds = float(os.environ.get(SAVE_SECONDS) or _DEFAULT_SAVE_SECONDS)
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        for index, rank in enumerate(self._ranks, self._first):
            if rank.poll() is None:
                # Not the process group: loader workers are still needed. A rank that is still
                # importing has nothing to save, and would print a traceback on SIGINT.
                handles = number != signal.SIGINT or reports.has_started(self._failures, index)
                os.kill(rank.pid, number if handles else signal.SIGTERM)

    def _conclude(self) -> Failure | None:
        codes = list(self._codes().values())
        if (left := self._ended_early()) is not None and {0, None}.issuperset(codes):
            # Not sys.exit, which the rank would have reported.
            return Failure(
                left,
                1,
                f"rank {left} ended with exit code 0 before its work was done: user code, or a "
                "library, called os._exit(0)",
            )
        if all(code == 0 for code in codes):
            return None
        if self._forwarded_signal is not None or _PREEMPTED.intersection(codes):
            # Ranks that have saved end together. After SIGINT there is nothing else to wait for.
            seconds = self._grace if self._forwarded_signal == signal.SIGINT else 30.0
            self._wait_all(min(seconds, self._deadline - time.monotonic()))
            ended_by = self._ended_by()
            if ended_by is not None:
                return self._describe_end(ended_by)
        # Give peers that fail for the same reason a moment to write their reports.
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
        """The signal that ended the ranks, directly or after a save; ``None`` if none did."""
        if self._forwarded_signal == signal.SIGINT or self._running():
            return self._forwarded_signal
        codes = list(self._codes().values())
        return next((n for n in preemption.SIGNALS if {-n, 128 + n}.intersection(codes)), None)

    def _first_failure(self) -> Failure:
        # Before signals: NCCL aborts a rank whose peer has raised an error.
        reported = reports.first_report(self._failures)
        if reported is not None:
            return reported
        codes = {rank: code for rank, code in self._codes().items() if code}
        signals = {n: -code for n, code in codes.items() if code < 0}
        # For the same reason, other signals take precedence over SIGABRT.
        for number in sorted(signals, key=lambda n: signals[n] == signal.SIGABRT):
            code = signals[number]
            return Failure(number, 128 + code, self._describe_kill(number, code))
        number, code = next(iter(codes.items()))
        return Failure(number, code, f"rank {number} exited with code {code}")

    def _describe_kill(self, rank: int, number: int) -> str:
        """Describe a rank that was killed by a signal, with its stack."""
        name = signal.Signals(number).name
        lines = []
        if position := watchdog.fault(self._failures, rank):
            lines.append(f"rank {rank} stood at:\n{position}")
        if number == signal.SIGABRT:
            # NCCL's thread aborts a rank that has waited too long for a peer.
            lines += self._positions()
        hint = "; if nobody sent it, memory ran out" if number == signal.SIGKILL else ""
        return "\n".join([*lines, f"rank {rank} was killed by {name}{hint}"])

    def _positions(self) -> list[str]:
        """Stacks of the running ranks."""
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
                # It is still importing and has not created its process group yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def _ended_early(self) -> int | None:
        """A rank that ended with exit code 0 before its work was done."""
        ended = (n for n, rank in enumerate(self._ranks) if rank.poll() == 0)
        return next((n for n in ended if reports.ended_early(self._failures, n)), None)

    def _wait_for_final(self) -> None:
        """Give ranks that have reported a failure a moment for Python's shutdown."""
        deadline = time.monotonic() + self._grace
        ending = [self._ranks[n - self._first] for n in reports.final(self._failures)]
        while any(rank.poll() is None for rank in ending) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _codes(self) -> dict[int, int | None]:
        """Exit code of each rank, without lost ranks that the others can do without.

        These were killed, or still work (hang) when all others have finished.
        """
        codes = {n: rank.poll() for n, rank in enumerate(self._ranks, self._first)}
        needed = {n: c for n, c in codes.items() if not reports.is_expendable(self._failures, n)}
        if needed and all(code == 0 for code in needed.values()):
            return needed
        return {n: code for n, code in codes.items() if n in needed or (code or 0) >= 0}

    def _running(self) -> list[Rank]:
        return [rank for rank in self._ranks if rank.poll() is None]

    def _wait_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
