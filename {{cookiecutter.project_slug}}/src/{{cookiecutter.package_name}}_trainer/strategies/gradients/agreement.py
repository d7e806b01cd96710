"""Check that all ranks are about to run the same collectives.

Nothing is sent as long as each rank repeats the sequence of events on which all ranks last agreed.
A rank that is about to deviate asks its peers through the process group's store.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

from ...errors import UserError
from ...launch import collectives

Event = tuple[str, ...]

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_BETWEEN_POLLS = 0.005
# How far a rank may run ahead of one that asks: collectives block it much earlier.
_REMEMBERED = 4096


class Agreement:
    """Compares the events of all ranks, which occur in the same order on every rank.

    An event is expected after another one if it followed it when all ranks last agreed on it. So
    all ranks expect the same, and if they differ, at least one of them asks.

    Args:
        explain: Formats the error for the user from this rank's event, another rank, and its event.
        timeout_seconds: How long a rank that asks waits for its peers.
    """

    def __init__(self, explain: Callable[[Event, int, Event], str], timeout_seconds: float) -> None:
        self._explain = explain
        self._timeout_seconds = timeout_seconds
        default = dist.distributed_c10d._get_default_store()
        self._store: dist.Store = dist.PrefixStore("agreement", default)
        self._expected: dict[Event, Event] = {}
        self._last: Event = ()
        self._count = 0
        self._recent: deque[tuple[Event, bool]] = deque(maxlen=_REMEMBERED)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="agreement", daemon=True)
        self._thread.start()

    def check(self, *event: str) -> None:
        """Continue if all ranks do the same.

        Raises:
            UserError: Another rank does something else.
        """
        is_expected = self._expected.get(self._last) == event
        if not is_expected:
            self._ask_peers(event)
            self._expected[self._last] = event
        self._last = event
        self._recent.append((event, not is_expected))
        self._count += 1

    def close(self) -> None:
        """Stop the thread; call this before the process group is destroyed."""
        self._ended.set()
        self._thread.join()

    def _ask_peers(self, event: Event) -> None:
        number, own = self._count, json.dumps([collectives.rank(), *event])
        first = json.loads(self._store.compare_set(f"{number}/first", "", own))
        if tuple(first[1:]) != event:
            self._store.set(f"{number}/answer", own)
            self._differs(event, first)
        if first[0] == collectives.rank():
            self._store.set(f"asked/{self._store.add('asked', 1)}", str(number))
        if self._store.add(f"{number}/count", 1) == collectives.world_size():
            self._store.set(f"{number}/answer", "[]")
        answer = self._wait(f"{number}/answer")
        if answer:
            self._differs(event, answer)

    def _differs(self, event: Event, other: list[str | int]) -> None:
        rank, *theirs = other
        raise UserError(self._explain(event, int(rank), tuple(map(str, theirs))))

    def _wait(self, key: str) -> list[str | int]:
        deadline = time.monotonic() + self._timeout_seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"wait timeout after {self._timeout_seconds:g} s")
            time.sleep(_SECONDS_BETWEEN_POLLS)
        answer: list[str | int] = json.loads(self._store.get(key))
        return answer

    def _serve(self) -> None:
        """Send this rank's events to peers that ask, unless this rank has asked itself."""
        seen, waiting = 0, []
        # If the store is gone, the run has ended, and the main thread reports why.
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
                asked = self._store.add("asked", 0)
                new = range(seen + 1, asked + 1)
                waiting += [int(self._store.get(f"asked/{each}")) for each in new]
                seen = asked
                passed = [number for number in waiting if number < self._count]
                waiting = [number for number in waiting if number not in passed]
                for number in passed:
                    self._send(number)

    def _send(self, number: int) -> None:
        back = self._count - number
        if back <= len(self._recent):
            event, has_asked = self._recent[-back]
            if not has_asked:
                own = json.dumps([collectives.rank(), *event])
                self._store.set(f"{number}/answer", own)
