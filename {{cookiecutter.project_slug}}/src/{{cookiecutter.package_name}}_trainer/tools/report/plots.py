"""Plots as data that ``page.js`` draws with Vega-Lite, each with a table of its numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .reading import Series

# Points of all curves together, which keeps the page small; and of one of them; rows of a table.
_MOST_POINTS, _MOST_OF_ONE, _ROWS = 20_000, 1_000, 12


@dataclass(frozen=True)
class Plot:
    """A plot: its title, what ``page.js`` gets of it, and its numbers as a table."""

    title: str
    data: dict[str, Any]
    heads: list[str]
    rows: list[list[str]]


def curves(names: Sequence[str], logs: Sequence[Series]) -> list[Plot]:
    """One plot for each name of a value, with a curve for each run that has it."""
    metrics = dict.fromkeys(name for log in logs for name in log)
    total = sum(len(log) for log in logs)
    most = min(_MOST_OF_ONE, max(20, _MOST_POINTS // max(1, total)))
    return [_curve(metric, names, logs, most) for metric in metrics]


def _curve(metric: str, names: Sequence[str], logs: Sequence[Series], most: int) -> Plot:
    values, rows = [], []
    for name, log in zip(names, logs, strict=True):
        points = log.get(metric, [])
        for step, value in thinned(points, most):
            # JSON has neither infinity nor NaN.
            shown = value if math.isfinite(value) else None
            values.append({"name": name, "step": step, "value": shown})
        rows += [[name, str(step), repr(value)] for step, value in thinned(points, _ROWS)]
    data = {"kind": "curve", "domain": list(names), "values": values}
    return Plot(metric, data, ["run", "step", metric], rows)


def bars(title: str, parts: Mapping[str, Mapping[str, float]]) -> Plot:
    """A stacked bar for each name, of its parts."""
    kinds = list(next(iter(parts.values())))
    shown = [kind for kind in kinds if any(each[kind] > 0 for each in parts.values())]
    values = [
        {"name": name, "part": kind, "value": each[kind], "order": order}
        for name, each in parts.items()
        for order, kind in enumerate(shown)
    ]
    totals = {name: sum(each.values()) or 1.0 for name, each in parts.items()}
    rows = [
        [kind, *(f"{of[kind]:.4g} ({of[kind] / totals[name]:.1%})" for name, of in parts.items())]
        for kind in kinds
    ]
    return Plot(title, {"kind": "bars", "domain": shown, "values": values}, ["", *parts], rows)


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most so many of the points, unchanged: the ends, and the extremes of each range."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // (most - 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        indices = range(start, min(start + size, len(points)))
        kept |= {min(indices, key=lambda i: points[i][1]), max(indices, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]
