"""Writes the measurements of pipelines to docs/pipeline.md and its plot."""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from report import svg

# A process may wait this much longer than in theory, and a stage be this large beside the model.
LONGEST, LARGEST = 1.15, 0.40
COLORS = {
    "gpipe": "#868e96",
    "1f1b": "#d9480f",
}


@dataclass(frozen=True)
class Wait:
    """The part of a step in which processes wait: measured, and in theory."""

    schedule: str
    processes: int
    count: int
    found: float
    theory: float

    @property
    def is_long(self) -> bool:
        return self.found > LONGEST * self.theory


@dataclass(frozen=True)
class Memory:
    """MiB of each process at its peak, first stage first; `has_target`: see LARGEST."""

    name: str
    peaks: list[float]
    has_target: bool


def theory(processes: int, count: int) -> float:
    """The bubble of p processes and m micro-batches, of both schedules."""
    return (processes - 1) / (count + processes - 1)


def markdown(waits: list[Wait], memory: list[Memory], batch_size: int) -> str:
    """The report."""
    head = HEAD.format(
        date=datetime.date.today(),
        cores=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
        torch=torch.__version__,
        longest=LONGEST,
    )
    lines = [head]
    for processes in sorted({wait.processes for wait in waits}):
        lines += [f"### {processes} processes", ""]
        lines += _waiting([each for each in waits if each.processes == processes])
        lines.append("")
    lines += [MEMORY.format(batch=batch_size, largest=LARGEST), *_memory(memory), ""]
    return "\n".join(lines)


def _waiting(waits: list[Wait]) -> Iterator[str]:
    counts = sorted({wait.count for wait in waits})
    yield "| schedule | " + " | ".join(f"m = {count}" for count in counts) + " |"
    yield "|---" * (len(counts) + 1) + "|"
    for schedule in dict.fromkeys(each.schedule for each in waits):
        cells = {each.count: cell(each) for each in waits if each.schedule == schedule}
        yield f"| `{schedule}` | " + " | ".join(cells.get(count, "") for count in counts) + " |"


def cell(wait: Wait) -> str:
    """The measured value, and the theory in parentheses."""
    mark = "**" if wait.is_long else ""
    return f"{mark}{wait.found:.3f}{mark} ({wait.theory:.3f})"


def _memory(memory: list[Memory]) -> Iterator[str]:
    yield "| | MiB, first stage | MiB, last stage | larger one beside the whole model |"
    yield "|---|---|---|---|"
    whole = max(memory[0].peaks)
    for each in memory:
        last = f"{each.peaks[-1]:.0f}" if len(each.peaks) > 1 else ""
        part = max(each.peaks) / whole
        mark = "**" if each.has_target and part > LARGEST else ""
        yield f"| {each.name} | {each.peaks[0]:.0f} | {last} | {mark}{part:.0%}{mark} |"


def verdict(waits: list[Wait], memory: list[Memory]) -> list[str]:
    """One line for each target that is missed."""
    lines = [
        f"misses its target: {wait.schedule}, p = {wait.processes}, m = {wait.count}: "
        f"{wait.found:.3f}, in theory {wait.theory:.3f} (at most {LONGEST} times it)"
        for wait in waits
        if wait.is_long
    ]
    whole = max(memory[0].peaks)
    return lines + [
        f"misses its target: {each.name}: {max(each.peaks) / whole:.0%} (at most {LARGEST:.0%})"
        for each in memory
        if each.has_target and max(each.peaks) > LARGEST * whole
    ]


WIDTH, HEIGHT, LEFT, TOP, BETWEEN = 300, 220, 60, 60, 80


def plot(waits: list[Wait]) -> str:
    """A panel for each number of processes: measurements as points on lines of theory, an SVG."""
    panels = sorted({wait.processes for wait in waits})
    lines = list(_legend(dict.fromkeys(each.schedule for each in waits)))
    for index, processes in enumerate(panels):
        own = [each for each in waits if each.processes == processes]
        lines += _panel(own, LEFT + index * (WIDTH + BETWEEN))
    width = LEFT + len(panels) * (WIDTH + BETWEEN)
    total = TOP + HEIGHT + 60
    return svg(width, total, lines)


def _legend(schedules: Iterable[str]) -> Iterator[str]:
    for index, schedule in enumerate(schedules):
        x = LEFT + index * 110
        yield f'<circle cx="{x}" cy="16" r="4" fill="{COLORS[schedule]}"/>'
        yield f'<text x="{x + 10}" y="20">{schedule}</text>'
    yield f'<text x="{LEFT + 450}" y="20">points: measured; lines: theory</text>'


def _panel(waits: list[Wait], left: float) -> Iterator[str]:
    counts = sorted({wait.count for wait in waits})
    highest = max(max(each.found, each.theory) for each in waits)
    top = math.ceil(highest * 10) / 10

    def x(count: int) -> float:
        return left + WIDTH * math.log2(count) / max(1.0, math.log2(counts[-1]))

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / top)

    title = f"p = {waits[0].processes} processes: part of a step"
    yield f'<text x="{left}" y="{TOP - 14}">{title}</text>'
    for step in range(round(top * 10) + 1):
        at = y(step / 10)
        yield (
            f'<line x1="{left}" y1="{at:.1f}" x2="{left + WIDTH}" y2="{at:.1f}" stroke="#dee2e6"/>'
        )
        yield f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{step / 10:.1f}</text>'
    below = TOP + HEIGHT + 18
    for count in counts:
        yield f'<text x="{x(count):.1f}" y="{below}" text-anchor="middle">{count}</text>'
    middle = left + WIDTH / 2
    yield f'<text x="{middle}" y="{below + 22}" text-anchor="middle">m, micro-batches</text>'
    for schedule, color in COLORS.items():
        own = sorted(
            (each for each in waits if each.schedule == schedule), key=lambda each: each.count
        )
        corners = " ".join(f"{x(each.count):.1f},{y(each.theory):.1f}" for each in own)
        yield f'<polyline points="{corners}" fill="none" stroke="{color}"/>'
        for each in own:
            yield (
                f'<circle cx="{x(each.count):.1f}" cy="{y(each.found):.1f}" r="4" fill="{color}"/>'
            )


HEAD = """\
# Pipelines, measured

You get how long the processes of the strategy `sequential` wait, and how much memory they need.
Generated by `make bench-pipeline` (`python benchmarks/pipeline.py`); do not edit.

{date}, {cores} cores ({machine}), Python {python}, torch {torch}, gloo.

## Waiting

The part of a step in which a process computes nothing (the bubble), with p processes and m
micro-batches. In theory, in parentheses: (p - 1) / (m + p - 1).

![The part of a step in which processes wait, measured and in theory](pipeline.svg)

Layers sleep instead of computing, so that two cores are enough for all processes: 100 ms or more in
the forward of a process and twice as long in its backward. What is added is about 5 ms per micro-
batch and stage: messages, the step around the pipeline, and Python. Where the bubble is small,
layers sleep longer, so that the schedule is measured and not these; layers of a few milliseconds
wait longer than in theory. The target is at most {longest} times the theory; values above it are
bold. Of up to five steps, the one in which processes wait least counts, because other work on the
machine delays some.
"""

MEMORY = """\
## Memory

MiB at the peak of a step, above the process' memory before the first one. The model is a
convolutional network ({batch} images of 32 x 32 pixels, Adam, 8 micro-batches, `1f1b`). Its first
layers have nearly all activations, and its last ones nearly all parameters. The target for the
larger stage is at most {largest:.0%} of the whole model, with `balance: memory`.
"""
