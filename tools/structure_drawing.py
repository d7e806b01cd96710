"""Draws the trainer's folders as docs/floors.svg of a project: its floors, and a batch's way.

``make tables`` runs this file; test_docs.py fails where the drawing is not up to date. The colors
are readable on light and dark pages.
"""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise

from structure_table import PROJECT_DESIGN, TRAINER, entries, floor, from_the_top, label, purpose

from local_extensions import COMPONENTS

FILE = PROJECT_DESIGN.with_name("floors.svg")
WIDTH, ROW, LANE, BOX = 900, 34, 110, 130
STYLE = """\
text { font: 13px sans-serif; fill: #1a237e } .note { fill: #808080; font-size: 12px }
rect { fill: #e8eaf6; stroke: #5c6bc0; rx: 5px } .part { stroke-dasharray: 4 3 }
.band { fill: #808080; stroke: none; opacity: .1; rx: 0 }
path { fill: none; stroke: #ef6c00; stroke-width: 2 } circle { fill: #ef6c00 }
.step { fill: #fff; font-weight: bold; text-anchor: middle }"""


def way() -> list[str]:
    """Return the entries through which a batch passes, in the order of the table in design.md."""
    table = PROJECT_DESIGN.read_text(encoding="utf-8").split("## The path of a batch\n")[1]
    files = re.findall(r"^\| `(\w+)/", table.split("\n## ")[0], re.MULTILINE)
    return list(dict.fromkeys(files))


def _optional(name: str, text: str) -> str:
    """Return a part of the drawing, under the condition of the template that keeps its folder."""
    condition = f'{{% if cookiecutter.{name} == "yes" %}}{text}{{% endif %}}'
    return condition if name in COMPONENTS else text


def _box(x: int, y: int, width: int, name: str) -> str:
    style = ' class="part"' if name.strip("/") in COMPONENTS else ""
    return (
        f'<rect{style} x="{x}" y="{y + 5}" width="{width}" height="{ROW - 10}"/>'
        f'<text x="{x + 8}" y="{y + 22}">{escape(name)}</text>'
    )


def _steps(middles: dict[str, int]) -> list[str]:
    """Return the numbered circles of a batch's way, and the arrows between them."""
    lines, steps = [], way()
    for one, two in pairwise(steps):
        start, end = middles[one], middles[two]
        bend = LANE - 40 - abs(end - start) // 5
        lines.append(
            f'<path d="M{LANE - 12} {start} C{bend} {start} {bend} {end} {LANE - 24} {end}"/>'
        )
        tip = f"M{LANE - 30} {end - 5} L{LANE - 22} {end} L{LANE - 30} {end + 5}"
        lines.append(f'<path d="{tip}"/>')
    for number, name in enumerate(steps, 1):
        y = middles[name]
        lines.append(f'<circle cx="{LANE - 10}" cy="{y}" r="10"/>')
        lines.append(f'<text class="step" x="{LANE - 10}" y="{y + 5}">{number}</text>')
    return lines


def _engines(y: int) -> list[str]:
    """Return a row of boxes: the folders of strategies."""
    folders = sorted(path.parent.name for path in (TRAINER / "strategies").glob("*/__init__.py"))
    lines, x = [], LANE + 46
    for name in folders:
        width = 7 * len(name) + 16
        lines.append(_optional(name, _box(x, y, width, name)))
        x += width + 7
    return lines


def drawing() -> str:
    """Return the picture as SVG."""
    lines: list[str] = []
    middles: dict[str, int] = {}
    y, last = 8, -1
    for name in from_the_top(entries()):
        rows = 2 if name == "strategies" else 1
        if floor(name) % 2:
            lines.append(
                f'<rect class="band" x="0" y="{y}" width="{WIDTH}" height="{rows * ROW}"/>'
            )
        if floor(name) != last:
            lines.append(f'<text class="note" x="8" y="{y + 22}">{floor(name)}</text>')
        last, middles[name] = floor(name), y + ROW // 2
        text = escape(purpose(name).replace("``", ""))
        note = f'<text class="note" x="{LANE + 45 + BOX}" y="{y + 22}">{text}</text>'
        lines.append(_optional(name, _box(LANE + 30, y, BOX, label(name)) + note))
        if rows == 2:
            lines += _engines(y + ROW)
        y += rows * ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, *_steps(middles), "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
