"""Measures all contestants, alternating, and writes docs/benchmarks.md.

python benchmarks/run.py           all of it: seven rounds, about twenty minutes
python benchmarks/run.py --quick   a smoke run of two minutes; writes nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import report
from child import STEADY_PEAKS, measure
from job import Job
from plots import GRAY, ORANGE, Bar, bars
from render import BUILD, render_project, time_render
from rounds import Reading, check_losses, column, differences, play, ratios, spread

Name = tuple[str, str]  # event, entry
Rounds = Mapping[Name, Sequence[Reading]]

RAW = "hand-written loop"
DEFAULTS = "**bundled trainer**, its defaults"
JOBS = {
    RAW: Job("raw"),
    "**bundled trainer**, bare": Job("bundled"),
    "**bundled trainer**, CSV every 50 steps": Job("bundled", "logging"),
    DEFAULTS: Job("bundled", "everything"),
    "**bundled trainer**, its defaults and all other numbers": Job("bundled", "numbers"),
    "Accelerate": Job("accelerate"),
    "Lightning, bare": Job("lightning"),
    "Lightning, CSV every 50 steps": Job("lightning", "logging"),
    "Lightning, its defaults": Job("lightning", "everything"),
    f"{RAW}, fused AdamW": Job("raw", fused=True),
    f"{DEFAULTS}, fused AdamW": Job("bundled", "everything", fused=True),
}
SOME = [name for name, job in JOBS.items() if job.variant not in ("logging", "numbers")]
# A smoke run starts each contestant once for each number of processes.
SMOKE = [RAW, DEFAULTS, "Accelerate", "Lightning, its defaults"]
EVENTS = {
    "mlp": [*JOBS],
    "transformer": SOME,
    "ranks": [name for name in SOME if not JOBS[name].fused],
    "render": ["this template", "a template with one file (the minimum for cookiecutter)"],
}
SMOKE_EVENTS = EVENTS | {"mlp": SMOKE, "transformer": SMOKE[:2], "ranks": SMOKE}
# Subject, steps before those that are timed, and these; in a smoke run as well.
LENGTHS = {
    "mlp": (Job("", subject="mlp", warmup=1000, steps=4000), (50, 150, 100)),
    "transformer": (Job("", subject="transformer", warmup=20, steps=80), (2, 4, 10)),
    "ranks": (Job("", subject="mlp", warmup=500, steps=2000), (50, 100, 100)),
}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=[*EVENTS])
    options = parser.parse_args()
    if options.rounds < 5 and not options.quick:
        parser.error("--rounds: medians of less than five say nothing")

    page = report.Page(options, "benchmarks")
    source = render_project()
    quick, whole = (
        [(event, entry) for event in options.events for entry in entries[event]]
        for entries in (SMOKE_EVENTS, EVENTS)
    )

    def measured(name: Name, is_quick: bool = options.quick) -> Reading:
        return measure_one(*name, source, is_quick)

    if options.quick:
        rounds = play(quick, measured, 1)
    else:
        play(quick, lambda name: measured(name, True), 1)  # fills caches, compiles modules
        rounds = play(whole, measured, options.rounds, lines=BUILD / "rounds.jsonl")
    for event in set(options.events) - {"render"}:
        own = {entry: found for (one, entry), found in rounds.items() if one == event}
        check_losses(own, RAW, part=0.25, more=0.02)
    count = len(next(iter(rounds.values())))
    parts = {
        "machine": report.machine("torch", "lightning", "accelerate", more=f"{count} rounds."),
        **{event: event_table(rounds, event) for event in options.events},
    }
    page.publish(parts, plot(rounds) if "mlp" in options.events else "")


def measure_one(event: str, entry: str, source: Path, is_quick: bool) -> Reading:
    """Measure an entry of an event; of several ranks, the mean time and the largest memory."""
    if event == "render":
        return {"s": time_render(one_file=entry != "this template")}
    length, (warmup, steps, epoch) = LENGTHS[event]
    if is_quick:
        length = replace(length, warmup=warmup, steps=steps, epoch=epoch)
    own = JOBS[entry]
    job = replace(length, contestant=own.contestant, variant=own.variant, fused=own.fused)
    ranks = 2 if event == "ranks" else 1
    variables = STEADY_PEAKS | {"PYTHONPATH": str(source)}
    found: list[Reading] = measure("contestants.py", job, variables, ranks)
    means = {key: sum(column(found, key)) / ranks for key in found[0]}
    return means | {key: max(column(found, key)) for key in ("first_step_s", "peak_mib")}


def event_table(rounds: Rounds, event: str) -> str:
    """Return the table of an event."""
    entries = {entry: found for (one, entry), found in rounds.items() if one == event}
    if event == "render":
        rows = [(name, spread(column(found, "s"), 2)) for name, found in entries.items()]
        return report.table(["", "s"], rows)
    key, unit, scale, digits = {
        "mlp": ("step_ms", "µs per step", 1e3, 1),
        "transformer": ("step_ms", "ms per step", 1.0, 2),
        "ranks": ("cpu_ms", "CPU µs per step", 1e3, 1),
    }[event]
    head = ["", unit, "more than the loop", "ratio", "first step, s more", "peak memory, MB"]
    return report.table([*head, "ratio"], _steps(entries, key, scale, digits))


def _steps(
    entries: Mapping[str, Sequence[Reading]], key: str, scale: float, digits: int
) -> Iterator[list[str]]:
    """Time per step, difference from the hand-written loop, first step, peak memory."""
    raw = entries[RAW]
    for entry, found in entries.items():
        steps = [value * scale for value in column(found, key)]
        raw_steps = [value * scale for value in column(raw, key)]
        first, raw_first = column(found, "first_step_s"), column(raw, "first_step_s")
        peaks, raw_peaks = column(found, "peak_mib"), column(raw, "peak_mib")
        peak = spread([each * 2**20 / 1e6 for each in peaks], 0)
        if entry == RAW:
            yield [entry, spread(steps, digits), "", "", f"{spread(first, 2)} total", peak, ""]
            continue
        yield [
            entry,
            spread(steps, digits),
            spread(differences(steps, raw_steps), digits, sign=True),
            f"{median(ratios(steps, raw_steps)):.2f}",
            spread(differences(first, raw_first), 2, sign=True),
            peak,
            f"{median(ratios(peaks, raw_peaks)):.3f}",
        ]


def plot(rounds: Rounds) -> str:
    """Bars of the time per step of the MLP more than the hand-written loop's, as an SVG."""
    raw = column(rounds["mlp", RAW], "step_ms")
    rows = []
    for (event, entry), found in rounds.items():
        if event == "mlp" and not entry.startswith(RAW) and not JOBS[entry].fused:
            more = 1e3 * median(differences(column(found, "step_ms"), raw))
            color = ORANGE if "bundled" in entry else GRAY
            rows.append(Bar(entry.replace("*", ""), {color: more}, f"{more:+.0f} µs"))
    return bars(rows)


if __name__ == "__main__":
    main()
