"""Plots as data, which ``page.js`` draws with Vega-Lite and ``page.html`` shows as tables."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from .reading import Series

# Points of all curves together, which keeps the page small; and of one of them.
_MOST_POINTS, _MOST_OF_ONE = 20_000, 1_000

Plot = dict[str, Any]
"""``title``; ``kind``: a key of ``specs`` in ``page.js``; ``domain``: what colors tell apart;
``values``."""


def curves(logs: Mapping[str, Series]) -> list[Plot]:
    """One plot for each name of a value, with a curve for each run that has it."""
    total = sum(len(log) for log in logs.values())
    most = min(_MOST_OF_ONE, max(20, _MOST_POINTS // max(1, total)))
    made = []
    for metric in dict.fromkeys(name for log in logs.values() for name in log):
        values = [
            # JSON has neither infinity nor NaN.
            {"name": run, "step": step, "value": value if math.isfinite(value) else None}
            for run, log in logs.items()
            for step, value in thinned(log.get(metric, []), most)
        ]
        made.append({"title": metric, "kind": "curve", "domain": [*logs], "values": values})
    return made


def bars(title: str, rows: Mapping[str, Mapping[str, float]]) -> Plot:
    """A stacked bar for each name, of its categories that are above zero in one of the bars."""
    kinds = [kind for kind in next(iter(rows.values())) if any(row[kind] for row in rows.values())]
    values = [
        {"name": name, "part": kind, "order": order, "value": row[kind], "all": total}
        for name, row in rows.items()
        for total in [sum(row.values())]
        for order, kind in enumerate(kinds)
    ]
    return {"title": title, "kind": "bars", "domain": kinds, "values": values}


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most so many of the points, unchanged: the ends, and the extremes of each range."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // (most - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        part = points[start : start + size]
        kept |= {min(part, key=itemgetter(1)), max(part, key=itemgetter(1))}
    return sorted(kept)
