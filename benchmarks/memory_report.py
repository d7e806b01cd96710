"""Turns what the memory benchmark found into docs/memory.md and its plot."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from xml.sax.saxutils import escape

from memory_entries import Entry
from memory_subject import CONTEXT, Size
from report import spread

Found = dict[int, dict[str, list[dict[str, float]]]]  # ranks, entry, round, reading

BOUND = 1.05  # times what the script by hand took
HAND_RANKS = 4
KINDS = ("parameters", "gradients", "optimizer")

HOW = """\
## How it is measured

- Adam in fp32, on CPUs over gloo, through the trainer. Each measurement is a fresh start of all
  ranks, one thread (`OMP_NUM_THREADS=1`) each, and all strategies must come to the same loss.
- *By accounting*: four bytes a parameter for the parameters, four for their gradients, eight for
  Adam's two numbers, and four more where DeepSpeed steps a copy of the parameters; divided by the
  ranks where the strategy divides it. *Counted*: the storages of live tensors when an optimizer
  steps, each once.
- *Resident* is what the kernel says (`VmRSS`, `VmHWM`), of the rank that has most, above its base:
  imports and the process group, before the model has memory (`meta_device=True`).
  `MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_` and `MALLOC_ARENA_MAX` are set, so that what
  is freed is given back. *Steady* is after a step, its gradients freed; DDP keeps the memory that
  they lie in. *Peak* is that of all steps, from the first; that of the set-up stands beside it.
- A step's time is wall time less the time that the rank stood ready without getting a core, mean
  of the ranks. Every other round runs backwards, and a ratio is to ddp of the same round. There are
  fewer cores than four ranks, who then wait for each other too.
- *By hand* are scripts without a trainer, written before it for the same optimizer and a model of
  as many parameters, on four ranks. The aim is at most {bound} times their memory. That for `fsdp`
  was read with gradients still there.
"""


def markdown(found: Found, entries: list[Entry], size: Size, left_out: list[str]) -> str:
    """The report."""
    rounds = max(len(results) for table in found.values() for results in table.values())
    parts = [
        "# Memory of a rank",
        "The strategies that divide what a rank holds, beside ddp. Written by `make bench-memory`\n"
        "(`python benchmarks/memory.py`); do not edit.",
        f"{datetime.date.today()}, {rounds} rounds, {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, {', '.join(_versions())}. "
        f"A GPT of {size.parameters / 1e6:.1f} million parameters ({size.depth} blocks, "
        f"{size.width} wide), one sequence of {CONTEXT} tokens a rank and step. All memory in MiB; "
        "medians of the rounds, in brackets the smallest and the largest.",
        "![MiB of a rank above its base, peak and steady](memory.svg)",
    ]
    for ranks in sorted(found, reverse=True):
        shown = [entry for entry in entries if entry.name in found[ranks]]
        parts += [
            f"## {ranks} ranks",
            _resident(found[ranks], shown, size, ranks),
            f"### What it is made of, {ranks} ranks",
            _accounts(found[ranks], shown, size, ranks),
        ]
    used = [entry for entry in entries if entry.options]
    parts.append("\n".join(f"- {entry.name}: `strategy_options={entry.options}`" for entry in used))
    if left_out:
        parts.append("\n".join(f"- {line}" for line in left_out))
    return "\n\n".join([*filter(None, parts), HOW.format(bound=BOUND)])


def _versions() -> Iterator[str]:
    for name in ("torch", "fairscale", "deepspeed"):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def _resident(
    table: dict[str, list[dict[str, float]]], entries: list[Entry], size: Size, ranks: int
) -> str:
    rows = [
        "| | accounts | steady | by hand | peak | by hand | peak of set-up | s a step | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        results = table[entry.name]
        theory = sum(entry.theory(size.parameters, ranks).values())
        cells = [entry.name, f"{theory:.0f}"]
        for key, ratio in zip(("steady", "peak"), _ratios(entry, results, ranks), strict=True):
            cells += [spread([each[key] for each in results], 0), ratio]
        cells += [
            spread([each["set_up"] for each in results], 0),
            spread([each["step_s"] for each in results], 2),
            f"{median(_beside_ddp(table, results)):.2f}" if "ddp" in table else "",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _beside_ddp(
    table: dict[str, list[dict[str, float]]], results: list[dict[str, float]]
) -> list[float]:
    return [mine["step_s"] / ddp["step_s"] for mine, ddp in zip(results, table["ddp"], strict=True)]


def _ratios(entry: Entry, results: list[dict[str, float]], ranks: int) -> list[str]:
    """Steady and peak beside the script by hand; bold if too much."""
    if entry.by_hand is None or ranks != HAND_RANKS:
        return ["", ""]
    cells = []
    for key, by_hand in zip(("steady", "peak"), entry.by_hand, strict=True):
        ratio = median(each[key] for each in results) / by_hand
        mark = "**" if ratio > BOUND else ""
        cells.append(f"{by_hand:.0f}, ratio {mark}{ratio:.2f}{mark}")
    return cells


def _accounts(
    table: dict[str, list[dict[str, float]]], entries: list[Entry], size: Size, ranks: int
) -> str:
    rows = [
        "| | parameters | counted | gradients | counted | optimizer state | counted |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        theory = entry.theory(size.parameters, ranks)
        cells = [entry.name]
        for kind in KINDS:
            counted = median(each[kind] for each in table[entry.name])
            cells += [f"{theory[kind]:.0f}", f"{counted:.0f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def verdict(found: Found, entries: list[Entry]) -> list[str]:
    """A line for each figure that has one by hand, with its ratio."""
    lines = []
    for entry in entries:
        results = found.get(HAND_RANKS, {}).get(entry.name)
        if entry.by_hand is None or not results:
            continue
        for key, by_hand in zip(("steady", "peak"), entry.by_hand, strict=True):
            own = median(each[key] for each in results)
            word = "fails" if own > BOUND * by_hand else "holds"
            lines.append(
                f"{word}: {entry.name}, {key}: {own:.0f} MiB, by hand {by_hand:.0f}: "
                f"{own / by_hand:.3f} (at most {BOUND})"
            )
    return lines


def plot(found: Found, entries: list[Entry]) -> str:
    """Bars of peak and, before them, steady memory on most ranks, as an SVG."""
    table = found[max(found)]
    shown = [entry for entry in entries if entry.name in table]
    peaks = [median(each["peak"] for each in table[entry.name]) for entry in shown]
    left, height, scale = 160, 30, 480 / max(peaks)
    lines = []
    for row, (entry, peak) in enumerate(zip(shown, peaks, strict=True)):
        y, steady = 34 + row * height, median(each["steady"] for each in table[entry.name])
        lines += [
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(entry.name)}</text>',
            f'<rect x="{left}" y="{y}" width="{peak * scale:.1f}" height="20" fill="#ced4da"/>',
            f'<rect x="{left}" y="{y}" width="{steady * scale:.1f}" height="20" fill="#d9480f"/>',
            f'<text x="{left + peak * scale + 6:.1f}" y="{y + 15}">'
            f"{steady:.0f}, peak {peak:.0f} MiB</text>",
        ]
    total = 44 + len(shown) * height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{total}" '
            f'viewBox="0 0 800 {total}" font-family="sans-serif" font-size="13">',
            f'<rect width="800" height="{total}" fill="white"/>',
            f'<text x="{left}" y="20">MiB of a rank above its base, {max(found)} ranks</text>',
            *lines,
            "</svg>\n",
        ]
    )
