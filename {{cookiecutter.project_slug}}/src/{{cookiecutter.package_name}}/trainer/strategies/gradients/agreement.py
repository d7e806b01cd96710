"""Whether all ranks are about to do the same, where their collectives would not match otherwise.

Nothing is sent as long as each rank does what all ranks did last time in its place. A rank that is
about to do something else asks the others, over the process group's store.
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
# So far a rank may run ahead of one that asks: their collectives hold it up long before.
_REMEMBERED = 4096


class Agreement:
    """Compares what ranks do, event by event, in the order in which every rank does them.

    An event is expected after another one where it followed that when all ranks last agreed on it.
    So expectations are the same on every rank, and where ranks differ at least one of them asks.

    Args:
        explain: what to tell the user: this rank's event, another rank, and its event.
        timeout_seconds: after which a rank that asks gives up waiting for the others.
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
        self._thread = threading.Thread(target=self._answer, name="agreement", daemon=True)
        self._thread.start()

    def check(self, *event: str) -> None:
        """Go on where all ranks do the same.

        Raises:
            UserError: another rank does something else.
        """
        is_expected = self._expected.get(self._last) == event
        if not is_expected:
            self._ask(event)
            self._expected[self._last] = event
        self._last = event
        self._recent.append((event, not is_expected))
        self._count += 1

    def close(self) -> None:
        """Answer no more; before the process group is destroyed."""
        self._ended.set()
        self._thread.join()

    def _ask(self, event: Event) -> None:
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

    def _answer(self) -> None:
        """Tell ranks that ask what this one has done in the same place, if it has not asked."""
        seen, waiting = 0, []
        # Where the store has gone, the run has ended, and the main thread says why.
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
                asked = self._store.add("asked", 0)
                new = range(seen + 1, asked + 1)
                waiting += [int(self._store.get(f"asked/{each}")) for each in new]
                seen = asked
                passed = [number for number in waiting if number < self._count]
                waiting = [number for number in waiting if number not in passed]
                for number in passed:
                    self._tell(number)

    def _tell(self, number: int) -> None:
        back = self._count - number
        if back <= len(self._recent):
            event, has_asked = self._recent[-back]
            if not has_asked:
                own = json.dumps([collectives.rank(), *event])
                self._store.set(f"{number}/answer", own)
