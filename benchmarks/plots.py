"""Bars and curves as SVG, without matplotlib: Lightning imports it if it is installed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

ORANGE, GRAY, LIGHT, DARK = "#d9480f", "#868e96", "#ced4da", "#495057"
BAR, LONGEST = 26, 380
WIDTH, HEIGHT, LEFT, TOP, BETWEEN, BELOW = 280, 200, 60, 42, 90, 50
Point = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """A row: what its label says, the values that it shows one before the other, and a text."""

    label: str
    values: Mapping[str, float]
    text: str


@dataclass(frozen=True)
class Curve:
    """Points in one color; `line` where other points make the line, `dashes` of it."""

    color: str
    points: Sequence[Point]
    line: Sequence[Point] | None = None
    dashes: str = ""


@dataclass(frozen=True)
class Panel:
    """Curves over a logarithmic axis with these ticks; `y`: of the other, with their texts."""

    title: str
    x_label: str
    x: Sequence[float]
    y: Mapping[float, str]
    curves: Sequence[Curve]
    is_logarithmic: bool = False

    def place(self, point: Point) -> Point:
        """Where a point is."""
        first, last = math.log2(self.x[0]), math.log2(self.x[-1])
        low, high = self._height(min(self.y)), self._height(max(self.y))
        right = (math.log2(point[0]) - first) / ((last - first) or 1)
        up = (self._height(point[1]) - low) / ((high - low) or 1)
        return WIDTH * right, HEIGHT * (1 - up)

    def _height(self, value: float) -> float:
        return math.log10(max(value, 1.0)) if self.is_logarithmic else value


def bars(rows: Sequence[Bar], left: int = 330, title: str = "") -> str:
    """A row for each bar."""
    top = 34 if title else 10
    longest = max([1.0, *(value for row in rows for value in row.values.values())])
    lines = [f'<text x="{left}" y="20">{escape(title)}</text>'] if title else []
    for number, row in enumerate(rows):
        y, end = top + number * BAR, 0.0
        lines.append(_text(left - 10, y + 14, row.label, "end"))
        for color, value in row.values.items():
            width = max(1.0, value / longest * LONGEST)
            end = max(end, width)
            lines.append(
                f'<rect x="{left}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>'
            )
        lines.append(_text(left + end + 6, y + 14, row.text))
    return _svg(800, top + 10 + len(rows) * BAR, lines)


def panels(
    shown: Sequence[Panel], legend: Mapping[str, str], note: str = "", columns: int = 3
) -> str:
    """Panels side by side below a legend, which has a color for each name, and a note."""
    columns = min(columns, len(shown))
    rows = math.ceil(len(shown) / columns)
    entries = [*legend.items(), *([(note, "none")] if note else [])]
    lines, top = [], 22 * math.ceil(len(entries) / 3) + TOP
    for index, (name, color) in enumerate(entries):
        x, y = LEFT + index % 3 * 270, 20 + index // 3 * 22
        lines += [f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{color}"/>', _text(x + 10, y, name)]
    for index, panel in enumerate(shown):
        left = LEFT + index % columns * (WIDTH + BETWEEN)
        place = f"translate({left},{top + index // columns * (TOP + HEIGHT + BELOW)})"
        lines += [f'<g transform="{place}">', *_panel(panel), "</g>"]
    return _svg(LEFT + columns * (WIDTH + BETWEEN), top + rows * (TOP + HEIGHT + BELOW), lines)


def _panel(panel: Panel) -> Iterator[str]:
    yield _text(0, -14, panel.title)
    for value, label in panel.y.items():
        y = panel.place((panel.x[0], value))[1]
        yield f'<line x1="0" y1="{y:.1f}" x2="{WIDTH}" y2="{y:.1f}" stroke="#dee2e6"/>'
        yield _text(-8, y + 4, label, "end")
    for value in panel.x:
        x = panel.place((value, 1.0))[0]
        yield _text(x, HEIGHT + 18, f"{value:.0f}", "middle")
    yield _text(WIDTH / 2, HEIGHT + 40, panel.x_label, "middle")
    for curve in panel.curves:
        corners = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in map(panel.place, curve.line or curve.points)
        )
        style = f'fill="none" stroke="{curve.color}" stroke-dasharray="{curve.dashes or "none"}"'
        yield f'<polyline points="{corners}" {style}/>'
        for x, y in map(panel.place, curve.points):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{curve.color}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: int, height: int, lines: Sequence[str]) -> str:
    size = f'width="{width}" height="{height}"'
    box = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box}>'
    return "\n".join([start, f'<rect {size} fill="white"/>', *lines, "</svg>\n"])
