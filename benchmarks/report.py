"""Turns the rounds into docs/benchmarks.md and its plot."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from xml.sax.saxutils import escape

Rounds = dict[str, dict[str, list[dict[str, float]]]]  # event, entry, round, reading

NAMES = {
    "raw bare": "hand-written loop",
    "bundled bare": "**bundled trainer**, bare",
    "bundled logging": "**bundled trainer**, CSV every 50 steps",
    "bundled everything": "**bundled trainer**, its defaults",
    "accelerate_ bare": "Accelerate",
    "lightning_ bare": "Lightning, bare",
    "lightning_ logging": "Lightning, CSV every 50 steps",
    "lightning_ everything": "Lightning, its defaults",
    "raw bare fused": "hand-written loop, fused AdamW",
    "bundled everything fused": "**bundled trainer**, its defaults, fused AdamW",
    "template": "this template",
    "one file": "a template of one file, cookiecutter's floor",
}

HOW = """\
## How it is measured

- All contestants run the same model, data, optimizer and number of steps, each measurement in a
  fresh process, and must end near the same loss. One thread (`OMP_NUM_THREADS=1`), float32, CPU.
- In a round every contestant runs once, and every other round runs backwards. A difference or a
  ratio is taken to the hand-written loop *of the same round*. Shown are the median and, in
  brackets, the smallest and the largest of the rounds.
- A step is wall time less the time the thread stood ready without getting a core
  (`/proc/thread-self/schedstat`), from the start of one step to the start of another thousands of
  steps later: ends of epochs, log lines and checkpoints are in it. For two processes it is CPU
  time, since the wall time there is mostly waiting for the other.
- The first step is timed from before the process starts to the end of step one, imports included.
- Peak memory is `VmHWM`, with `MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_` and
  `MALLOC_ARENA_MAX` set: without them it differs from run to run.
- *Bare* is without logging and bar; the bundled trainer saves at the end of each epoch even then.
  *Defaults* means what each does unless told otherwise: for both a log every 50 steps, a bar and a
  checkpoint an epoch; Lightning logs to TensorBoard, the bundled trainer to CSV and TensorBoard.
  Of Lightning's two bars it is the quicker, since `rich` is installed. Output goes to a terminal.
- An epoch has 1000 steps, so that the MLP's time holds a thousandth of a checkpoint a step; that of
  the transformer, whose window is shorter than an epoch, holds none.
- Fused AdamW is PyTorch's one-kernel version of the same optimizer, and what the examples of the
  rendered project use. It is a faster optimizer, not a faster loop: any contestant could use it.
"""


def markdown(rounds: Rounds) -> str:
    count = max(len(results) for entries in rounds.values() for results in entries.values())
    parts = [
        "# Benchmarks",
        "The bundled trainer against a hand-written loop, Lightning and Accelerate. Written by\n"
        "`make bench` (`python benchmarks/run.py`); do not edit.",
        f"{datetime.date.today()}, {count} rounds, {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "accelerate"))
        + ".",
    ]
    if "mlp" in rounds:
        parts += [
            "## Overhead: an MLP 32 wide, batch 8",
            "![Microseconds a step above the hand-written loop](benchmarks.svg)",
            _steps(rounds["mlp"], "step_us", "µs a step", 1, 1),
        ]
    if "transformer" in rounds:
        parts += [
            "## A real model: a transformer of 1.9 million parameters, batch 8 of 64 tokens",
            _steps(rounds["transformer"], "step_us", "ms a step", 1e-3, 2),
        ]
    if "ranks" in rounds:
        parts += [
            "## Two processes on gloo: the MLP, CPU time of each process",
            _steps(rounds["ranks"], "cpu_us", "CPU µs a step", 1, 1),
        ]
    if "render" in rounds:
        parts += ["## Rendering the template", _render(rounds["render"])]
    return "\n\n".join([*parts, HOW])


def _steps(
    entries: dict[str, list[dict[str, float]]], key: str, unit: str, scale: float, digits: int
) -> str:
    """A table: the step itself, above the hand-written loop, first step, peak memory."""
    raw = entries["raw bare"]
    rows = [
        f"| | {unit} | above the loop | ratio | first step, s above | peak memory, MB | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry, results in entries.items():

        def paired(key: str, what: Callable[[float, float], float]) -> list[float]:
            return [what(m[key], r[key]) for m, r in zip(results, raw, strict=True)]  # noqa: B023

        own = entry == "raw bare"
        step = spread([m[key] * scale for m in results], digits)
        above = spread([d * scale for d in paired(key, _minus)], digits, sign=True)
        ratio = f"{median(paired(key, _over)):.2f}"
        first = spread([m["first_step_s"] for m in results], 2) + " in all"
        if not own:
            first = spread(paired("first_step_s", _minus), 2, sign=True)
        peak = spread([m["peak_mb"] for m in results], 0)
        memory = f"{median(paired('peak_mb', _over)):.3f}"
        cells = [step, "" if own else above, "" if own else ratio, first, peak]
        rows.append(f"| {NAMES[entry]} | {' | '.join(cells)} | {'' if own else memory} |")
    return "\n".join(rows)


def _render(entries: dict[str, list[dict[str, float]]]) -> str:
    rows = ["| | s |", "|---|---|"]
    for entry, results in entries.items():
        rows.append(f"| {NAMES[entry]} | {spread([r['s'] for r in results], 2)} |")
    return "\n".join(rows)


def _minus(mine: float, raw: float) -> float:
    return mine - raw


def _over(mine: float, raw: float) -> float:
    return mine / raw


def spread(values: list[float], digits: int, sign: bool = False) -> str:
    form = f"{'+' if sign else ''}.{digits}f"
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:{form}} ({low:{form}} … {high:{form}})"


def plot(rounds: Rounds) -> str:
    """Bars of what each adds to the hand-written loop's step on the MLP, as an SVG."""
    # By hand: Lightning imports matplotlib wherever it is installed, and would be charged for it.
    entries = rounds.get("mlp", {})
    above = {
        NAMES[entry].replace("*", ""): median(
            m["step_us"] - r["step_us"] for m, r in zip(results, entries["raw bare"], strict=True)
        )
        for entry, results in entries.items()
        if entry != "raw bare" and "fused" not in entry
    }
    left, height, longest = 330, 26, max([1.0, *above.values()])
    lines = []
    for row, (name, value) in enumerate(above.items()):
        y, width = 10 + row * height, max(1.0, value / longest * 380)
        color = "#d9480f" if name.startswith("bundled") else "#868e96"
        lines += [
            f'<text x="{left - 10}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>',
            f'<text x="{left + width + 6:.1f}" y="{y + 14}">{value:+.0f} µs</text>',
        ]
    total = 20 + len(above) * height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{total}" '
            f'viewBox="0 0 800 {total}" font-family="sans-serif" font-size="13">',
            f'<rect width="800" height="{total}" fill="white"/>',
            *lines,
            "</svg>\n",
        ]
    )
