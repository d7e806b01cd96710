"""Plots as specifications of Vega-Lite, each with a table of its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .reading import Series, finite

# Points of all curves together, which keeps the page small; and of one of them.
_MOST_POINTS, _MOST_OF_ONE, _FEW = 20_000, 1_000, 30
_ROWS = 12
# Seen on a light and on a dark page (contrast of at least 3:1), and by the color-blind.
_REST = "#7d8590"
_COLORS = ["#2f81c7", "#cf6a12", "#169468", "#b8569b", "#8a7a1c", "#6f6fd8", "#c4504e"]
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


@dataclass(frozen=True)
class Plot:
    """A plot: its title, its specification, and its numbers as a table."""

    title: str
    spec: dict[str, Any]
    heads: list[str]
    rows: list[list[str]] = field(default_factory=list)
    is_wide: bool = False


def curves(names: Sequence[str], logs: Sequence[Series]) -> list[Plot]:
    """One plot for each name of a value, with a curve for each run that has it."""
    metrics = dict.fromkeys(name for log in logs for name in log)
    total = sum(len(log) for log in logs)
    most = min(_MOST_OF_ONE, max(20, _MOST_POINTS // max(1, total)))
    return [_curve(metric, names, logs, most) for metric in metrics]


def _curve(metric: str, names: Sequence[str], logs: Sequence[Series], most: int) -> Plot:
    values, rows = [], []
    for name, log in zip(names, logs, strict=True):
        if points := log.get(metric):
            kept = thinned(points, most)
            values += [{"r": name, "s": step, "v": finite(value)} for step, value in kept]
            rows += [[name, str(step), repr(value)] for step, value in thinned(points, _ROWS)]
    is_short = len(values) <= _FEW * len(names)
    spec = _spec(values)
    spec |= {
        "height": 200,
        "mark": {"type": "line", "point": {"size": 20} if is_short else False, "tooltip": True},
        "encoding": {
            "x": {
                "field": "s",
                "type": "quantitative",
                "title": "step",
                "axis": {"format": "d", "tickCount": 6},
            },
            "y": {
                "field": "v",
                "type": "quantitative",
                "title": None,
                "scale": {"zero": False},
                "axis": {"format": ".4~g"},
            },
            "color": _color(names, is_shown=len(names) > 1),
            "tooltip": [
                {"field": "r", "title": "run"},
                {"field": "s", "title": "step"},
                {"field": "v", "title": "value", "format": ".6~g"},
            ],
        },
    }
    return Plot(metric, spec, ["run", "step", metric], rows)


def bars(title: str, parts: Sequence[tuple[str, dict[str, float]]]) -> Plot:
    """A stacked bar for each name, of its parts."""
    kinds = list(dict.fromkeys(kind for _, each in parts for kind in each))
    shown = [kind for kind in kinds if any(each[kind] > 0 for _, each in parts)]
    spec = _spec(
        [
            {"r": name, "k": kind, "v": each[kind], "o": order}
            for name, each in parts
            for order, kind in enumerate(shown)
        ]
    )
    spec |= {
        "height": 32 * len(parts),
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "x": {"field": "v", "type": "quantitative", "title": None, "stack": "zero"},
            "y": {"field": "r", "type": "nominal", "title": None, "sort": None},
            "color": {"field": "k", "title": None, **_scale(shown), "legend": {"columns": 3}},
            "order": {"field": "o", "type": "quantitative"},
            "tooltip": [
                {"field": "r", "title": "of"},
                {"field": "k", "title": "part"},
                {"field": "v", "title": "time", "format": ".4~g"},
            ],
        },
    }
    totals = [sum(each.values()) or 1.0 for _, each in parts]
    rows = [
        [
            kind,
            *(
                f"{each[kind]:.4g} ({each[kind] / total:.1%})"
                for (_, each), total in zip(parts, totals, strict=True)
            ),
        ]
        for kind in kinds
    ]
    return Plot(title, spec, ["", *(name for name, _ in parts)], rows, is_wide=True)


def _spec(values: list[dict[str, Any]]) -> dict[str, Any]:
    return {"$schema": _SCHEMA, "data": {"values": values}, "width": "container"}


def _color(names: Sequence[str], is_shown: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"field": "r", "type": "nominal", "title": None, **_scale(names)}
    return found if is_shown else found | {"legend": None}


def _scale(domain: Sequence[str]) -> dict[str, Any]:
    colors = [_COLORS[index % len(_COLORS)] for index in range(len(domain))]
    if domain[-1:] == ["other"]:
        colors[-1] = _REST
    return {"type": "nominal", "scale": {"domain": list(domain), "range": colors}}


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


def number(points: Sequence[tuple[int, float]] | None) -> str:
    """The last value, in full precision."""
    return repr(points[-1][1]) if points else "not logged"
