"""Tables of what starts and stops of many ranks have used, and their picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import plots
from report import bold, table, wrapped
from scale_costs import Order

# A quantity that grows with more than this power of the ranks grows faster than linearly.
MOST = 1.15
EXTRAPOLATED = 1024
COLORS = ("#d9480f", "#1971c2", "#2f9e44", "#868e96", "#9c36b5", "#e8590c")


@dataclass(frozen=True)
class Found:
    """What a start has used.

    Args:
        name: of the strategy and launcher.
        ranks: how many were started.
        first_step_s: seconds to the last rank's first step.
        stop_s: seconds from the signal to the end.
        launcher: its threads and descriptors.
        each: by quantity, what each rank has used; operations are those of a store.
        kinds: operations of rank 0 to the first step, by kind.
    """

    name: str
    ranks: int
    first_step_s: float
    stop_s: float
    launcher: Mapping[str, float]
    each: Mapping[str, Sequence[float]]
    kinds: Mapping[str, int]

    def both(self, *quantities: str, digits: int = 0) -> tuple[str, str]:
        """Quantities of rank 0, and of the median rank."""
        of_0 = [f"{self.each[quantity][0]:.{digits}f}" for quantity in quantities]
        middle = [f"{median(self.each[quantity]):.{digits}f}" for quantity in quantities]
        return ", ".join(of_0), ", ".join(middle)


Groups = Mapping[str, Sequence[Found]]
Quantity = Callable[[Found], float]

# Of rank 0, unless they say otherwise.
QUANTITIES: dict[str, Quantity] = {
    "operations of rank 0": lambda found: found.each["operations"][0],
    "operations of all ranks": lambda found: sum(found.each["operations"]),
    "operations per second of all ranks": lambda found: sum(found.each["rate"]),
    "threads": lambda found: found.each["threads"][0],
    "descriptors": lambda found: found.each["descriptors"][0],
    "own memory": lambda found: found.each["own_mib"][0],
    "processor time to the first step": lambda found: found.each["cpu_s"][0],
    "threads of the launcher": lambda found: found.launcher["threads"],
    "descriptors of the launcher": lambda found: found.launcher["descriptors"],
}


def by_name(found: Sequence[Found]) -> Groups:
    """The starts of each strategy and launcher, by their number of ranks."""
    groups: dict[str, list[Found]] = {}
    for each in sorted(found, key=lambda each: each.ranks):
        groups.setdefault(each.name, []).append(each)
    return groups


def growth(found: Sequence[Found]) -> dict[str, float]:
    """The power of the number of ranks with which each quantity grows.

    Between the two largest starts: what does not depend on the ranks hides the rest in small ones.
    """
    low, high = found[-2], found[-1]
    times = math.log(high.ranks / low.ranks)
    ends = {name: (of(low), of(high)) for name, of in QUANTITIES.items()}
    return {
        name: math.log(max(b, 1e-9) / a) / times if a and b else 0.0
        for name, (a, b) in ends.items()
    }


def starts(groups: Groups) -> str:
    """Times, threads, descriptors, memory and processor time of each start."""
    head = ["", "ranks", "s to the first step", "s to stop", "launcher: threads, descriptors"]
    for word in (
        "threads, descriptors",
        "MiB resident, own",
        "processor s to the first step, to stop",
    ):
        head += [f"rank 0: {word}", "median rank"]
    rows = []
    for each in (each for group in groups.values() for each in group):
        launcher = f"{each.launcher['threads']:.0f}, {each.launcher['descriptors']:.0f}"
        cells = [each.name, f"{each.ranks}", f"{each.first_step_s:.1f}", f"{each.stop_s:.1f}"]
        cells += [launcher, *each.both("threads", "descriptors")]
        cells += each.both("resident_mib", "own_mib")
        rows.append([*cells, *each.both("cpu_s", "cpu_stop_s", digits=2)])
    return table(head, rows)


def operations(groups: Groups) -> str:
    """Operations of the store of each start."""
    head = ["", "ranks", "rank 0, by kind", "rank 0", "median rank", "all ranks"]
    head += ["per second: rank 0", "all ranks", "steps per second", "all ranks, to stop"]
    rows = []
    for each in (each for group in groups.values() for each in group):
        kinds = ", ".join(f"{kind} {each.kinds[kind]}" for kind in sorted(each.kinds))
        first, rates = each.each["operations"], each.each["rate"]
        cells = [each.name, f"{each.ranks}", kinds, f"{first[0]:,}", f"{median(first):,.0f}"]
        cells += [f"{sum(first):,}", f"{rates[0]:.1f}", f"{sum(rates):.0f}"]
        cells += [f"{median(each.each['steps_per_s']):.1f}", f"{sum(each.each['stopping']):,}"]
        rows.append(cells)
    return table(head, rows)


def growths(groups: Groups) -> str:
    """The power with which each quantity grows; bold above linear."""
    powers = {name: growth(group) for name, group in groups.items()}
    rows = [
        [name, *(bold(f"{power:.2f}", power > MOST) for power in own.values())]
        for name, own in powers.items()
    ]
    return table(["", *QUANTITIES], rows)


def line_through(found: Sequence[Found], quantity: str) -> float:
    """A quantity for more ranks, on the line through the two largest starts."""
    low, high = (QUANTITIES[quantity](each) for each in found[-2:])
    slope = (high - low) / (found[-1].ranks - found[-2].ranks)
    return max(high, high + slope * (EXTRAPOLATED - found[-1].ranks))


def server(costs: Mapping[str, float]) -> str:
    """What an operation costs the server of a store."""
    shown = ", ".join(f"{kind} {value:.1f}" for kind, value in costs.items())
    return wrapped(
        f"Each operation costs the server as much processor time as the dearest measured one, so "
        f"that it handles at most {1e6 / max(costs.values()):,.0f} per second. Measured, in "
        f"microseconds: {shown}."
    )


def extrapolation(groups: Groups, costs: Mapping[str, float]) -> str:
    """What more ranks would use."""
    head = ["", "descriptors of rank 0", "own MiB of rank 0"]
    head += ["operations to the first step, all ranks", "s of the server"]
    head += ["operations per second, all ranks", "part of a core"]
    seconds = max(costs.values()) / 1e6
    rows = []
    for name, group in groups.items():
        descriptors, own, first, rate = (
            line_through(group, quantity)
            for quantity in (
                *("descriptors", "own memory", "operations of all ranks"),
                "operations per second of all ranks",
            )
        )
        cells = [name, f"{descriptors:,.0f}", f"{own:.0f}", f"{first:,.0f}"]
        rows.append([*cells, f"{first * seconds:.1f}", f"{rate:,.0f}", f"{rate * seconds:.1%}"])
    return table(head, rows)


def order(orders: Sequence[Order], step_us: float) -> str:
    """What orders of samples cost, beside the smallest step."""
    head = ["samples", "order", "ms to the first", "ms to resume", "MiB", "µs per batch"]
    rows = [
        [
            *(f"{each.samples:,}", "held" if each.is_held else "computed"),
            *(f"{each.first_ms:.1f}", f"{each.resume_ms:.1f}", f"{each.mib:,.1f}"),
            *(f"{each.batch_us:.1f}", f"{each.batch_us / step_us:.1%}"),
        ]
        for each in orders
    ]
    smallest = f"The smallest step took {step_us:.0f} µs."
    return f"{smallest}\n\n{table([*head, 'of a step'], rows)}"


PANELS = {
    "operations, all ranks": QUANTITIES["operations of all ranks"],
    "descriptors, rank 0": QUANTITIES["descriptors"],
    "own MiB, rank 0": QUANTITIES["own memory"],
}


def plot(groups: Groups) -> str:
    """A panel for each of three quantities, on logarithmic scales, as an SVG."""
    legend = dict(zip(groups, itertools.cycle(COLORS), strict=False))
    shown = []
    for title, of in PANELS.items():
        points = {name: [(each.ranks, of(each)) for each in own] for name, own in groups.items()}
        shown.append(
            _panel(title, [plots.Curve(legend[name], own) for name, own in points.items()])
        )
    return plots.panels(shown, legend, "dashed: in proportion to the number of ranks")


def _panel(title: str, curves: list[plots.Curve]) -> plots.Panel:
    ranks = sorted({rank for curve in curves for rank, _ in curve.points})
    values = [max(value, 1.0) for curve in curves for _, value in curve.points]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values) * 1.01))
    # It ends where the panel does.
    most = min(ranks[-1] / ranks[0], 10**high / min(values))
    ends = [(ranks[0], min(values)), (ranks[0] * most, min(values) * most)]
    proportional = plots.Curve(plots.DARK, [], line=ends, dashes="4 4")
    powers = {float(10**power): f"{10**power:,}" for power in range(low, high + 1)}
    return plots.Panel(title, "ranks", ranks, powers, [proportional, *curves], is_logarithmic=True)
