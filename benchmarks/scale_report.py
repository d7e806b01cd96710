"""Writes what starts and stops of many ranks have used to docs/scale.md, and its plot."""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from report import svg
from scale_order import BATCH, Order

# A quantity that grows with more than this power of the ranks grows faster than linearly.
MOST = 1.15
EXTRAPOLATED = 1024
COLORS = ("#d9480f", "#1971c2", "#2f9e44", "#868e96", "#9c36b5", "#e8590c")


@dataclass(frozen=True)
class Start:
    """So many ranks of a strategy, started by a launcher."""

    launch: str
    strategy: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.launch}"


@dataclass(frozen=True)
class Process:
    """What a process holds while it trains, and its processor time to the first and last step."""

    threads: float
    descriptors: float
    resident_mib: float = 0.0
    own_mib: float = 0.0
    cpu_s: float = 0.0
    cpu_stop_s: float = 0.0


@dataclass(frozen=True)
class Found:
    """What a start has used; operations of the store are those of all kinds together."""

    start: Start
    first_step_s: float
    stop_s: float
    launcher: Process
    rank_0: Process
    median: Process
    kinds_0: dict[str, int]
    first_0: int
    first_median: float
    first_all: int
    rate_0: float
    rate_all: float
    steps_per_s: float
    stop_all: int


def by_name(found: Iterable[Found]) -> dict[str, list[Found]]:
    """The starts of each strategy and launcher, by their number of ranks."""
    groups: dict[str, list[Found]] = {}
    for each in sorted(found, key=lambda each: each.start.ranks):
        groups.setdefault(each.start.name, []).append(each)
    return groups


def growth(found: list[Found]) -> dict[str, float]:
    """The power of the number of ranks with which each quantity of rank 0 grows.

    Between the two largest starts: what does not depend on the ranks hides the rest in small ones.
    """
    low, high = found[-2], found[-1]
    quantities = {
        "operations of rank 0": (low.first_0, high.first_0),
        "operations of all ranks": (low.first_all, high.first_all),
        "operations per second of all ranks": (low.rate_all, high.rate_all),
        "threads": (low.rank_0.threads, high.rank_0.threads),
        "descriptors": (low.rank_0.descriptors, high.rank_0.descriptors),
        "own memory": (low.rank_0.own_mib, high.rank_0.own_mib),
        "processor time to the first step": (low.rank_0.cpu_s, high.rank_0.cpu_s),
        "threads of the launcher": (low.launcher.threads, high.launcher.threads),
        "descriptors of the launcher": (low.launcher.descriptors, high.launcher.descriptors),
    }
    times = math.log(high.start.ranks / low.start.ranks)
    return {
        name: math.log(max(b, 1e-9) / a) / times if a and b else 0.0
        for name, (a, b) in quantities.items()
    }


def verdict(found: list[Found]) -> list[str]:
    """One line for each quantity that grows faster than the number of ranks."""
    return [
        f"grows faster than linearly: {name}: {quantity}: ranks ** {power:.2f}"
        for name, group in by_name(found).items()
        for quantity, power in growth(group).items()
        if power > MOST
    ]


# --- the page -------------------------------------------------------------------------------------


def markdown(
    found: list[Found], costs: dict[str, float], orders: list[Order], step_us: float
) -> str:
    """The report.

    Args:
        found: The starts.
        costs: Microseconds of a store's server, by kind of operation.
        orders: Of samples.
        step_us: Microseconds of the smallest step.
    """
    groups = by_name(found)
    head = HEAD.format(
        date=datetime.date.today(),
        cores=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        torch=torch.__version__,
    )
    lines = [
        head,
        *_starts(groups),
        "",
        OPERATIONS,
        *_operations(groups),
        "",
        GROWTH.format(most=MOST),
    ]
    lines += [*_growth(groups), "", *_extrapolation(groups, costs)]
    lines += [ORDER.format(batch=BATCH, step=step_us), *_orders(orders, step_us), "", HOW]
    return "\n".join(lines)


def _starts(groups: dict[str, list[Found]]) -> Iterator[str]:
    yield (
        "| | ranks | s to the first step | s to stop | launcher: threads, descriptors "
        "| rank 0: threads, descriptors | median rank | rank 0: MiB resident, own | median rank "
        "| rank 0: processor s to the first step, to stop | median rank |"
    )
    yield "|---" * 11 + "|"
    for name, group in groups.items():
        for each in group:
            cells = [name, f"{each.start.ranks}", f"{each.first_step_s:.1f}", f"{each.stop_s:.1f}"]
            cells.append(f"{each.launcher.threads:.0f}, {each.launcher.descriptors:.0f}")
            both = (each.rank_0, each.median)
            cells += [f"{one.threads:.0f}, {one.descriptors:.0f}" for one in both]
            cells += [f"{one.resident_mib:.0f}, {one.own_mib:.0f}" for one in both]
            cells += [f"{one.cpu_s:.2f}, {one.cpu_stop_s:.2f}" for one in both]
            yield f"| {' | '.join(cells)} |"


def _operations(groups: dict[str, list[Found]]) -> Iterator[str]:
    yield (
        "| | ranks | rank 0, by kind | rank 0 | median rank | all ranks "
        "| per second: rank 0 | all ranks | steps per second | all ranks, to stop |"
    )
    yield "|---" * 10 + "|"
    for name, group in groups.items():
        for each in group:
            kinds = ", ".join(f"{kind} {each.kinds_0[kind]}" for kind in sorted(each.kinds_0))
            cells = [name, f"{each.start.ranks}", kinds, f"{each.first_0:,}"]
            cells += [f"{each.first_median:,.0f}", f"{each.first_all:,}"]
            cells += [f"{each.rate_0:.1f}", f"{each.rate_all:.0f}", f"{each.steps_per_s:.1f}"]
            yield f"| {' | '.join([*cells, f'{each.stop_all:,}'])} |"


def _growth(groups: dict[str, list[Found]]) -> Iterator[str]:
    powers = {name: growth(group) for name, group in groups.items()}
    quantities = list(next(iter(powers.values())))
    yield "| | " + " | ".join(quantities) + " |"
    yield "|---" * (len(quantities) + 1) + "|"
    for name, own in powers.items():
        cells = [f"**{each:.2f}**" if each > MOST else f"{each:.2f}" for each in own.values()]
        yield f"| {name} | {' | '.join(cells)} |"


def line_through(found: list[Found], read: str, at: int = EXTRAPOLATED) -> float:
    """A quantity of rank 0 for more ranks, on the line through the two largest starts."""
    (n, low), (m, high) = ((each.start.ranks, _read(each, read)) for each in found[-2:])
    return max(high, high + (high - low) / (m - n) * (at - m))


def _read(found: Found, name: str) -> float:
    value: Any = getattr(found, name, None) or getattr(found.rank_0, name, 0.0)
    return float(value)


def _extrapolation(groups: dict[str, list[Found]], costs: dict[str, float]) -> Iterator[str]:
    dearest = max(costs.values())
    shown = ", ".join(f"{kind} {value:.1f}" for kind, value in costs.items())
    yield EXTRAPOLATION.format(ranks=EXTRAPOLATED, costs=shown, most=f"{1e6 / dearest:,.0f}")
    yield (
        "| | descriptors of rank 0 | own MiB of rank 0 | operations to the first step, all ranks "
        "| s of the server | operations per second, all ranks | part of a core |"
    )
    yield "|---" * 7 + "|"
    for name, group in groups.items():
        if len(group) < 2:
            continue
        first, rate = line_through(group, "first_all"), line_through(group, "rate_all")
        cells = [name, f"{line_through(group, 'descriptors'):,.0f}"]
        cells += [f"{line_through(group, 'own_mib'):.0f}", f"{first:,.0f}"]
        cells += [f"{first * dearest / 1e6:.1f}", f"{rate:,.0f}", f"{rate * dearest / 1e6:.1%}"]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _orders(orders: list[Order], step_us: float) -> Iterator[str]:
    yield "| samples | order | ms to the first | ms to resume | MiB | µs per batch | of a step |"
    yield "|---" * 7 + "|"
    for order in orders:
        how = "held" if order.is_held else "computed"
        cells = [f"{order.samples:,}", how, f"{order.first_ms:.1f}", f"{order.resume_ms:.1f}"]
        cells += [f"{order.mib:,.1f}", f"{order.batch_us:.1f}", f"{order.batch_us / step_us:.1%}"]
        yield f"| {' | '.join(cells)} |"


# --- the plot -------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, BETWEEN = 280, 220, 60, 130, 90
PANELS = {
    "operations, all ranks": "first_all",
    "descriptors, rank 0": "descriptors",
    "own MiB, rank 0": "own_mib",
}


def plot(found: list[Found]) -> str:
    """A panel for each of three quantities, on logarithmic scales, as an SVG."""
    groups = by_name(found)
    lines = list(_legend(groups))
    for index, (title, read) in enumerate(PANELS.items()):
        lines += _panel(groups, title, read, LEFT + index * (WIDTH + BETWEEN))
    width, total = LEFT + len(PANELS) * (WIDTH + BETWEEN), TOP + HEIGHT + 60
    return svg(width, total, lines)


def _legend(groups: Iterable[str]) -> Iterator[str]:
    for index, name in enumerate(groups):
        x, y = LEFT + index % 3 * 300, 20 + index // 3 * 22
        yield f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{COLORS[index % len(COLORS)]}"/>'
        yield f'<text x="{x + 10}" y="{y}">{escape(name)}</text>'
    yield f'<text x="{LEFT}" y="86">dashed: in proportion to the number of ranks</text>'


def _panel(groups: dict[str, list[Found]], title: str, read: str, left: float) -> Iterator[str]:
    ranks = sorted({each.start.ranks for group in groups.values() for each in group})
    values = [max(_read(each, read), 1.0) for group in groups.values() for each in group]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values) * 1.01))

    def x(count: float) -> float:
        return left + WIDTH * math.log2(count / ranks[0]) / math.log2(ranks[-1] / ranks[0])

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - (math.log10(max(value, 1.0)) - low) / (high - low))

    yield f'<text x="{left}" y="{TOP - 14}">{title}</text>'
    for power in range(low, high + 1):
        at = y(10**power)
        ends = f'x1="{left}" y1="{at:.1f}" x2="{left + WIDTH}" y2="{at:.1f}"'
        yield f'<line {ends} stroke="#dee2e6"/>'
        yield f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10**power:,}</text>'
    for count in ranks:
        at = TOP + HEIGHT + 18
        yield f'<text x="{x(count):.1f}" y="{at}" text-anchor="middle">{count}</text>'
    middle = left + WIDTH / 2
    yield f'<text x="{middle}" y="{TOP + HEIGHT + 40}" text-anchor="middle">ranks</text>'
    start = min(values)
    end = min(ranks[-1] / ranks[0] * start, 10**high)
    to = ranks[0] * end / start
    yield (
        f'<line x1="{x(ranks[0]):.1f}" y1="{y(start):.1f}" x2="{x(to):.1f}" y2="{y(end):.1f}" '
        'stroke="#495057" stroke-dasharray="4 4"/>'
    )
    for index, group in enumerate(groups.values()):
        color = COLORS[index % len(COLORS)]
        points = [(x(each.start.ranks), y(_read(each, read))) for each in group]
        corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        yield f'<polyline points="{corners}" fill="none" stroke="{color}"/>'
        for a, b in points:
            yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{color}"/>'


HEAD = """\
# Start and stop of many ranks

You get what the processes of a run use when 8 to 64 ranks start, train a tiny model and stop, on
one machine. Generated by `make bench-scale` (`python benchmarks/scale.py`); do not edit.

{date}, {cores} cores ({machine}), Python {python}, torch {torch}, gloo. All ranks share these
cores, which other work used too: seconds of the clock are those of this machine, not of a cluster.
Compare counts, memory and processor time.

![Operations, descriptors and memory by the number of ranks](scale.svg)

## Start and stop
"""

OPERATIONS = """\
## Operations of the store

Of the trainer and of torch, up to the end of the first step; per second while the ranks train; and
from the signal that stops them to their end. On one node the own launcher uses a file as store, and
the agent of torchrun serves a TCPStore. With two nodes (both are this machine) rank 0 serves one.
"""

GROWTH = """\
## Growth

The power of the number of ranks with which a quantity of rank 0 or of its launcher grows, between
the two largest starts: 1 is linear, 0 is constant, 2 would be quadratic. Above {most} it is bold.
Descriptors and operations of a rank that connects to all others are linear, and those of all ranks
together quadratic: so more than 16 ranks connect only to those with which they exchange something.
"""

EXTRAPOLATION = """\
## {ranks} ranks, extrapolated

On the line through the two largest starts. Assumptions: more ranks join as these do, and one server
handles all operations one after the other, as torch's does. Each costs it as much processor time as
the dearest measured one, so that it handles at most {most} per second.
Measured, in microseconds: {costs}.
Where ranks wait longer for each other, they also look at the store more often: twice a
second from the tenth second on. Imports, the file system, NCCL and the network of a cluster are not
in these numbers.
"""

ORDER = """\
## The order of a billion samples

Above a million samples the order of an epoch is computed batch by batch, by a keyed permutation,
instead of being held, as before. Processor time on one rank, to its first batch of {batch} samples
and to one in the middle of the epoch, and memory. The last column compares a batch with the
smallest step of the trainer, of a model of one layer: {step:.0f} µs. In a step of a millisecond or
more, the order takes less than 1%. A held order of a billion samples would have 7,629 MiB.
"""

HOW = """\
## How it is measured

- Two linear layers, one sample per rank and step, SGD, on CPUs over gloo, with the CSV logger. A
  step sleeps 0.2 s, as if a device computed. One start per row. Ranks are forked from processes
  that have imported torch and the trainer (the project's fork servers), as 64 imports on these
  cores would take minutes: times are without imports. *Own* memory is each rank's part of shared
  pages and its own (`Pss`).
- *To the first step*: until the last rank has ended its first step. *To stop*: from SIGTERM to the
  launcher until it has ended; the ranks agree on a step, save a checkpoint, and end.
- Threads, descriptors and memory are those while the ranks train; of two launchers, node 0's.
- Operations are counted in each rank by a store around torch's, through which the trainer's Python
  and torch's C++ code (gloo's connections) both pass. What a launcher itself asks of a store is not
  counted, nor are retries inside one operation. A `get` of torch's TCPStore waits first, which is
  two messages, and a `wait` of a FileStore reads its file until the key is there.
"""
