"""Weigh the micro-batches of a step by what is in them, over all ranks."""

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch

from ..errors import UserError, shown
from ..launch import collectives
from .samples import SampleCounter
from .sampling import MicroBatch, Share

MOST_AHEAD = 8
"""Batches that ranks agree on at once, or one step; they are read before the first is used."""


class Counted(NamedTuple):
    """A batch that was read, or the error of one that could not be; what it counts in means."""

    data: Any
    samples: int
    counted: float
    is_last: bool


class Counter:
    """Counts the batches of a loader: by the module's hooks, or by what is in them."""

    def __init__(self, share: Share) -> None:
        self._share, self._counter = share, SampleCounter()

    def count(self, batch: Any, expected: int | None, *, is_last: bool) -> Counted:
        """Count a batch that was made for so many samples; 0: it is read to take part only."""
        if expected == 0:
            return Counted(batch, 0, 0.0, is_last)
        share = self._share
        if share.count_samples is None:
            samples = float(self._counter.count(batch, expected))
        else:
            samples = checked("count_samples", share.count_samples(batch))
        counted = samples
        if share.count_weight is not None:
            counted = checked("count_weight", share.count_weight(batch))
        return Counted(batch, int(samples), counted, is_last)


def checked(name: str, given: Any) -> float:
    """Check what a hook returned."""
    try:
        number = float(given)
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if not 0 <= number < math.inf:
        raise UserError(f"{name} returned {shown(given)}: return a number from 0 on")
    return number


def endless(batches: Iterator[Counted]) -> Iterator[Counted]:
    """Yield all batches; then the last one, without samples, or the error of reading, for ever."""
    last = Counted(None, 0, 0.0, True)
    try:
        for last in batches:
            yield last
        yield from repeat(last._replace(samples=0, counted=0.0))
    except Exception as error:  # it is raised in its turn
        yield from repeat(Counted(error, 0, 0.0, False))


def weighed(
    batches: Iterator[Counted],
    accumulate: int,
    ranks: int,
    *,
    first: int = 0,
    start: int = 0,
    known: int | None = None,
    is_refused: bool = True,
) -> Iterator[MicroBatch]:
    """Yield micro-batches whose weights make each step the mean over all that it contains.

    The micro-batches of a step are read before its first is yielded, and ``ranks`` tell each other
    what these count: for one step, then for more, up to :data:`MOST_AHEAD` batches.

    ``batches``: of this replica, from number ``first`` on; those before ``start`` are skipped. With
    several micro-batches or ranks it must be :func:`endless`. ``known``: batches of this rank's
    loader. ``is_refused``: whether loaders must end together.
    """
    most = accumulate * max(1, MOST_AHEAD // accumulate) if ranks > 1 else accumulate
    ahead, index = deque(islice(batches, accumulate)), first
    while ahead:
        rows = _exchanged(ahead, ranks, known)
        for at, row in enumerate(rows):
            data, samples, counted, _ = ahead.popleft()
            if isinstance(data, Exception):
                raise data
            has_ended = _has_ended(row, index + 1, is_refused)
            if index >= start:
                step = rows[at - at % accumulate :][:accumulate]
                total = sum(each[0] for of_ranks in step for each in of_ranks)
                weight = counted * ranks / total if total else 0.0
                ends_step = has_ended or (index + 1) % accumulate == 0
                yield MicroBatch(data, index, samples, weight, ends_step, has_ended, counted)
            if has_ended:
                return
            index += 1
            ahead.extend(islice(batches, 2 if len(rows) < most else 1))


def _exchanged(ahead: "deque[Counted]", ranks: int, known: int | None) -> list[list[list[float]]]:
    """By batch and rank: what it counts, whether it is the last, and the loader's batches or -1."""
    own = [(each.counted, each.is_last, known or -1) for each in ahead]
    if ranks == 1:
        return [[[*each]] for each in own]
    rows = torch.zeros(len(own), ranks, 3, dtype=torch.float64)
    rows[:, collectives.rank()] = torch.tensor(own, dtype=torch.float64)
    agreed: list[list[list[float]]] = collectives.all_reduce(rows).tolist()
    return agreed


def _has_ended(row: list[list[float]], count: int, is_refused: bool) -> bool:
    """Whether the loaders of all ranks have ended after so many batches."""
    ended = [bool(is_last) for _, is_last, _ in row]
    if is_refused and any(ended) and not all(ended):
        counts = [
            str(count) if is_last else f"{most:.0f}" if most > count else f"more than {count}"
            for _, is_last, most in row
        ]
        found = (f"rank {rank} has {each}" for rank, each in enumerate(counts))
        raise UserError(
            f"the ranks' loaders give different numbers of batches: {', '.join(found)}; give each "
            "the same number, or set uneven_inputs='join'"
        )
    return all(ended)
