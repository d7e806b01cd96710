"""Detect NCCL collectives that do not complete, before NCCL aborts the process.

gloo raises an error if a collective takes too long. NCCL's own thread aborts the process, without
the stacks of the ranks. So a thread reads torch's flight recorder, which counts collectives.

Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_POLL_SECONDS = 1.0
# NCCL's own timeout is this much longer, so that all reports are written before it.
_MARGIN_SECONDS = 120.0
_STATES = ("last_enqueued_collective", "last_completed_collective")
_Counts = tuple[str, ...]


class NCCLWatch:
    """Monitors this rank's collectives in a thread.

    Args:
        rank: This rank.
        timeout_seconds: Maximum time of a collective, from its launch on the CPU.
        end: Called with a description of the collective that timed out; ends this process.
        directory: Returns where the flight recorder's records are written then; ``None``: nowhere.
    """

    def __init__(
        self,
        rank: int,
        timeout_seconds: float,
        end: Callable[[str], object],
        directory: Callable[[], Path | None],
    ) -> None:
        self._rank, self._timeout, self._end = rank, timeout_seconds, end
        self._directory = directory
        self._unchanged: dict[str, tuple[_Counts, float]] = {}
        self._closed = threading.Event()
        _set_nccl_timeout(timeout_seconds + _MARGIN_SECONDS)
        self._thread = threading.Thread(target=self._watch, name="nccl-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        seconds = min(_POLL_SECONDS, self._timeout / 5)
        while not self._closed.wait(seconds):
            if (hung := self.hung(time.monotonic())) is not None:
                self._record()
                self._end(f"{hung} did not complete within {self._timeout:g} s")
                return

    def hung(self, now: float) -> str | None:
        """Description of the collective that has timed out; ``None`` if there is none."""
        waits = False
        for group, status in _recorded(collectives=False).get("pg_status", {}).items():
            counts = tuple(str(status[name]) for name in _STATES)
            before, since = self._unchanged.get(group, (None, now))
            if counts != before or len(set(counts)) == 1:  # progress, or no collective is pending
                self._unchanged[group] = counts, now
            elif now - since >= self._timeout:
                waits = True
        # Read the long list only now. The counts alone may be those of an idle group.
        return _oldest() if waits else None

    def _record(self) -> None:
        directory = self._directory()
        if directory is None:
            return
        # A full disk must not keep the rank from ending, and from saying what has hung.
        with contextlib.suppress(OSError):
            directory.mkdir(exist_ok=True)
            path = directory / f"nccl-rank-{self._rank}.json"
            path.write_text(json.dumps(_recorded(), indent=1))


def _oldest() -> str | None:
    entries = _recorded(active=True).get("entries", [])
    names = [each["profiling_name"] for each in entries if not each["retired"]]
    return names[0] if names else None


def _recorded(collectives: bool = True, active: bool = False) -> dict[str, Any]:
    """The flight recorder's records; empty in builds of torch without NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    found: dict[str, Any] = json.loads(dump(collectives, active)) if dump is not None else {}
    return found


def _set_nccl_timeout(seconds: float) -> None:
    group: Any = dist.group.WORLD
    backend = group._get_backend(torch.device("cuda"))
    backend._set_default_timeout(datetime.timedelta(seconds=seconds))
