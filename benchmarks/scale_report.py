"""Tables of what starts and stops of many ranks have used."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from report import bold, table

# A quantity that grows with more than this power of the ranks grows faster than linearly.
MOST = 1.15


@dataclass(frozen=True)
class Start:
    """Seconds to the last rank's first step, and from the signal to the end of so many ranks.

    Of the launcher, its threads and descriptors; of each rank, what scale_rank.py has written.
    """

    ranks: int
    first_step_s: float
    stop_s: float
    launcher: Mapping[str, float]
    readings: Sequence[Mapping[str, Any]]

    def until(self, moment: str, name: str) -> list[float]:
        """What each rank has used until a moment: the first step, steady training, or the end."""
        return [reading[moment][name] for reading in self.readings]

    def between(self, start: str, stop: str, name: str) -> list[float]:
        """What each rank has used between two moments."""
        pairs = zip(self.until(start, name), self.until(stop, name), strict=True)
        return [after - before for before, after in pairs]

    def rates(self, name: str) -> list[float]:
        """What each rank uses per second of training."""
        seconds = self.between("warm", "steady", "at")
        used = self.between("warm", "steady", name)
        return [amount / time for amount, time in zip(used, seconds, strict=True)]


Groups = Mapping[str, Sequence[Start]]

# Of rank 0, unless they say otherwise.
QUANTITIES: dict[str, Callable[[Start], float]] = {
    "operations of rank 0": lambda start: start.until("first", "operations")[0],
    "operations of all ranks": lambda start: sum(start.until("first", "operations")),
    "operations per second of all ranks": lambda start: sum(start.rates("operations")),
    "threads": lambda start: start.until("steady", "threads")[0],
    "descriptors": lambda start: start.until("steady", "descriptors")[0],
    "own memory": lambda start: start.until("steady", "own_mib")[0],
    "processor time to the first step": lambda start: start.until("first", "cpu_s")[0],
    "threads of the launcher": lambda start: start.launcher["threads"],
    "descriptors of the launcher": lambda start: start.launcher["descriptors"],
}


def starts(groups: Groups) -> str:
    """Times, threads, descriptors, memory and processor time of each start."""
    head = ["", "ranks", "s to the first step", "s to stop", "launcher: threads, descriptors"]
    head += ["rank 0: threads, descriptors", "median rank"]
    head += ["rank 0: MiB resident, own", "median rank"]
    head += ["rank 0: processor s to the first step, to stop", "median rank"]
    return table(head, _rows(groups, _start_cells))


def operations(groups: Groups) -> str:
    """Operations of the store of each start."""
    head = ["", "ranks", "rank 0, by kind", "rank 0", "median rank", "all ranks"]
    head += ["per second: rank 0", "all ranks", "steps per second", "all ranks, to stop"]
    return table(head, _rows(groups, _operation_cells))


def _rows(groups: Groups, cells: Callable[[Start], list[str]]) -> Iterator[list[str]]:
    for name, group in groups.items():
        for start in group:
            yield [name, f"{start.ranks}", *cells(start)]


def _start_cells(start: Start) -> list[str]:
    threads, descriptors, resident, own = (
        start.until("steady", name)
        for name in ("threads", "descriptors", "resident_mib", "own_mib")
    )
    first, stop = start.until("first", "cpu_s"), start.between("steady", "end", "cpu_s")
    return [
        f"{start.first_step_s:.1f}",
        f"{start.stop_s:.1f}",
        f"{start.launcher['threads']}, {start.launcher['descriptors']}",
        *_of_rank_0_and_median(threads, descriptors, digits=0),
        *_of_rank_0_and_median(resident, own, digits=0),
        *_of_rank_0_and_median(first, stop, digits=2),
    ]


def _of_rank_0_and_median(*quantities: Sequence[float], digits: int) -> tuple[str, str]:
    of_rank_0 = ", ".join(f"{values[0]:.{digits}f}" for values in quantities)
    return of_rank_0, ", ".join(f"{median(values):.{digits}f}" for values in quantities)


def _operation_cells(start: Start) -> list[str]:
    kinds = start.readings[0]["first"]["kinds"]
    first, rates = start.until("first", "operations"), start.rates("operations")
    return [
        ", ".join(f"{kind} {kinds[kind]}" for kind in sorted(kinds)),
        *(f"{first[0]:,}", f"{median(first):,.0f}", f"{sum(first):,}"),
        *(f"{rates[0]:.1f}", f"{sum(rates):.0f}", f"{median(start.rates('step')):.1f}"),
        f"{sum(start.between('steady', 'end', 'operations')):,}",
    ]


def growths(groups: Groups) -> str:
    """The power of the ranks with which each quantity grows; bold above linear.

    Between the two largest starts: what does not depend on the ranks hides the rest in small ones.
    """
    rows = []
    for name, group in groups.items():
        powers = [_power(quantity, *group[-2:]) for quantity in QUANTITIES.values()]
        rows.append([name, *(bold(f"{power:.2f}", power > MOST) for power in powers)])
    return table(["", *QUANTITIES], rows)


def _power(quantity: Callable[[Start], float], low: Start, high: Start) -> float:
    before, after = quantity(low), quantity(high)
    if not before or not after:
        return 0.0
    return math.log(max(after, 1e-9) / before) / math.log(high.ranks / low.ranks)
