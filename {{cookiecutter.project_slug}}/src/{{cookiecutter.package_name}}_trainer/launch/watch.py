"""Watch the ranks that this process has started: end all when one fails, and name the first."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from . import cluster, failures, hangs, reports, signals
from .failures import Failure

_DEFAULT_SAVE_SECONDS = 120.0
_SECONDS_TO_NOTICE = 8.0
_GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL, for the other ranks after a failure
_POLL_SECONDS = 0.05
_PREEMPTED = {128 + number for number in signals.SIGNALS}


class Rank(Protocol):
    """A started process; the id of its process group is its own."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, negative for a signal; ``None`` while it runs."""


@dataclass(frozen=True)
class NodeLaunch:
    """The ranks that a launcher starts on this node."""

    processes: int
    directory: Path  # of reports, and of the store if there is one node
    layout: cluster.Layout = field(default_factory=cluster.Layout)  # of the nodes

    def variables(self, local_rank: int) -> dict[str, str]:
        """Environment variables of a rank, named as torchrun names them."""
        layout = self.layout
        store = {cluster.STORE: str(self.directory / cluster.STORE_FILE)}
        return {
            "RANK": str(layout.node_rank * self.processes + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.processes * layout.num_nodes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": str(layout.node_rank),
            "GROUP_WORLD_SIZE": str(layout.num_nodes),
            "MASTER_ADDR": layout.main_address,
            # 0 on one node: no TCP store is used. With several nodes, rank 0 serves the store.
            "MASTER_PORT": str(layout.main_port),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            # A set of names has one order on all ranks: list(set(labels)) numbers classes.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            cluster.OVERRIDE: "environment",  # the launcher's own is not meant for its ranks
            reports.DIRECTORY: str(self.directory),
            reports.PARENT: str(os.getpid()),
            reports.RANK_PROCESS: "",  # each rank's own
            **(store if layout.num_nodes == 1 else {}),
        }


class Watcher:
    """Starts ranks and waits for them; terminates all ranks when one fails.

    ``start`` starts them, and returns each in rank order; ``method`` is that of multiprocessing.
    """

    def __init__(self, start: Callable[[], Iterable[Rank]], method: str, node: NodeLaunch) -> None:
        self._start, self._method = start, method
        self._ranks: dict[int, Rank] = {}
        self._node, self._directory = node, node.directory
        self._stack_file = partial(reports.stack_file, node.directory)
        self._save_seconds = float(os.environ.get(signals.SAVE_SECONDS) or _DEFAULT_SAVE_SECONDS)
        self._forwarded_signal: int | None = None
        self._deadline = math.inf

    def watch(self) -> Failure | None:
        """Start the ranks, forward signals, and wait until all have succeeded or one has failed.

        Return the first failure, with rank -1 if a signal ended the run.
        """
        # Python accepts signal handlers only in the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        forwarded = [sig for sig in signals.SIGNALS if is_main and not signals.is_ignored(sig)]
        previous: dict[signal.Signals, Any] = {}
        if is_main:  # ranks, which a terminal takes for background jobs, write to it (stty tostop)
            previous[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        try:
            with signals.block_sigint_in_children(self._method):  # SIGINT is forwarded later
                first = self._node.layout.node_rank * self._node.processes
                self._ranks.update(enumerate(self._start(), first))
                previous |= {number: signal.signal(number, self._forward) for number in forwarded}
            while None in (codes := self._codes().values()) and time.monotonic() < self._deadline:
                if any(code not in (None, 0) for code in codes) or self._early_end() is not None:
                    break
                time.sleep(_POLL_SECONDS)
            return self._conclude()
        finally:
            for ending in (signal.SIGTERM, signal.SIGKILL):
                self._signal_all(ending)
                self._wait_all(_GRACE_SECONDS)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: object) -> None:
        if number == self._forwarded_signal == signal.SIGINT:
            self._deadline = -math.inf
            self._signal_all(signal.SIGKILL)
            return
        if number == signal.SIGHUP:
            signals.redirect_lost_terminal()
        self._forwarded_signal = number
        self._deadline = min(self._deadline, time.monotonic() + self._save_seconds)
        for index, rank in self._running().items():
            # Not the process group: loader workers are still needed. A rank that is still
            # importing has nothing to save, and would print a traceback on SIGINT.
            handles = number != signal.SIGINT or reports.state(self._directory, index)
            os.kill(rank.pid, number if handles else signal.SIGTERM)

    def _suspend(self, number: int, frame: object) -> None:
        """Stop with the ranks (Ctrl-Z), whose process groups the terminal does not know."""
        self._signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_all(signal.SIGCONT)

    def _conclude(self) -> Failure | None:
        codes = set(self._codes().values())
        if codes <= {0, None} and (early := self._early_end()) is not None:
            return early
        if codes <= {0}:
            return None
        if self._forwarded_signal is not None or _PREEMPTED & codes:
            # One that uploads may end later. After SIGINT there is nothing else to wait for.
            is_interrupted = self._forwarded_signal == signal.SIGINT
            seconds = _GRACE_SECONDS if is_interrupted else self._save_seconds
            self._wait_all(min(seconds, self._deadline - time.monotonic()))
            if (ended_by := self._ended_by()) == signal.SIGINT:
                report = failures.interrupted(self._directory)
                message = str(report or signals.INTERRUPTED)
                return Failure(-1, signals.INTERRUPTED_CODE, message, interrupted=report)
            if ended_by is not None:
                return Failure(-1, 128 + ended_by, f"ended by {signal.Signals(ended_by).name}")
        self._wait_all(seconds=0.5)  # peers that fail for the same reason may still write reports
        return self._first_failure()

    def _ended_by(self) -> int | None:
        """The signal that ended the ranks, directly or after a save; ``None`` if none did."""
        if self._forwarded_signal == signal.SIGINT or self._running():
            return self._forwarded_signal
        codes = set(self._codes().values())
        return next((number for number in signals.SIGNALS if {-number, 128 + number} & codes), None)

    def _first_failure(self) -> Failure:
        """A rank that failed by itself, or else the rank for which the others have waited."""
        failed = failures.failures(self._directory)
        if failed and failed[0].lost_at and self._node.layout.num_nodes > 1:
            # The ranks of this node notice at different times that one of another node was lost.
            self._wait_all(_SECONDS_TO_NOTICE)
            failed = failures.failures(self._directory)
        # Before ends without a report: NCCL aborts a rank whose peer has raised an error.
        if reported := [failure for failure in failed if not failure.lost_at]:
            return reported[0]
        lost = {failure.rank: failure.lost_at for failure in failed}
        lost |= {n: stack for n in self._ranks if n not in lost and (stack := self._lost_at(n))}
        # NCCL also aborts a rank whose peer was killed.
        ends = sorted(self._codes().items(), key=lambda end: end[1] == -signal.SIGABRT)
        for number, code in ends:
            if code and number not in lost and not hangs.has_timed_out(self._stack_file(number)):
                return self._end(number, code)
        return self._early_end() or self._hang(failed, lost)

    def _lost_at(self, number: int) -> str:
        """The stack of a rank that its timer, or NCCL, has ended while it waited for a peer."""
        path, code = self._stack_file(number), self._ranks[number].poll()
        is_ended = code == -signal.SIGABRT or (code and hangs.has_timed_out(path))
        stack = hangs.printed(path) if is_ended else ""
        return stack if hangs.waits_for_peers(stack) else ""

    def _end(self, number: int, code: int) -> Failure:
        """A rank that ended without a report, with its stack if it printed one."""
        if code > 0:
            return Failure(number, code, f"rank {number} exited with code {code}")
        stack = hangs.printed(self._stack_file(number))
        where = f"rank {number} stood at:\n{stack}\n" if stack else ""
        message = f"{where}rank {number} was killed by {signals.name_of(-code)}"
        if code == -signal.SIGKILL:
            message += "; if nobody sent it, memory ran out: see docs/trouble.md#a-rank-was-killed"
        return Failure(number, 128 - code, message)

    def _early_end(self) -> Failure | None:
        """A rank that ended with exit code 0 before its work was done."""
        for number, rank in self._ranks.items():
            if rank.poll() == 0 and (state := reports.state(self._directory, number)) != "started":
                # Not sys.exit while it works, which the rank would have reported.
                why = "its work was done: user code, or a library, called os._exit(0)"
                if not state:
                    why = "it reached the trainer: each rank runs the whole script, from its start"
                return Failure(number, 1, f"rank {number} ended with exit code 0 before {why}")
        return None

    def _hang(self, failed: Sequence[Failure], lost: dict[int, str]) -> Failure:
        """A rank that hangs while others wait for it, with the stacks of all."""
        lines = [f"rank {number} waited at:\n{stack}" for number, stack in sorted(lost.items())]
        advice, hung = hangs.advice(lost.values()), []
        for number, code in self._codes().items():
            if number in lost or code == 0:
                continue
            pid, path = self._ranks[number].pid, self._stack_file(number)
            running = "is stopped" if hangs.is_stopped(pid) else "stands"
            verb = "hangs" if code is not None else running
            stack = hangs.printed(path) if code is not None else hangs.request(pid, path)
            lines.append(f"rank {number} (process {pid}) {verb} at:\n{stack}")
            # A rank that entered the collective late has not waited long enough for its timeout.
            if verb == "is stopped" or not hangs.waits_for_peers(stack):
                hung.append(number)
        if hung:
            why = failed[0].reason if failed else "no batch ended in time"
            why += "; the strategy's timeout_seconds sets how long"
            waited = f"{reports.names(sorted(lost))} timed out ({why})" if lost else why
            line = f"{reports.names(hung, 'hangs')}: {waited}; see docs/trouble.md#a-rank-hangs"
            return Failure(hung[0], 1, "\n".join([*lines, line]) + advice)
        if failed:
            message = failed[0].message.removesuffix(advice) + advice
            hint = "\nno rank on this node hangs: look at the other nodes"
            several = self._node.layout.num_nodes > 1
            return Failure(failed[0].rank, failed[0].code, message + hint * several)
        last = f"rank {min(lost)} waited for peers until a timeout ended it"
        return Failure(min(lost), 1, "\n".join([*lines, last]))

    def _signal_all(self, number: int) -> None:
        for rank in self._running().values():
            try:
                os.killpg(rank.pid, number)
            except ProcessLookupError:
                # It is still importing and has not created its process group yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def _codes(self) -> dict[int, int | None]:
        """Exit code of each rank; ``None`` while it runs."""
        return {number: rank.poll() for number, rank in self._ranks.items()}

    def _running(self) -> dict[int, Rank]:
        return {number: rank for number, rank in self._ranks.items() if rank.poll() is None}

    def _wait_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
