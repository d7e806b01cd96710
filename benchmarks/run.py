"""Measures all contestants, alternating, and writes docs/benchmarks.md: `make bench`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import report
from child import STEADY_PEAKS, measure
from job import Job
from rounds import Reading, check_losses, column, differences, play, ratios, spread

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
BARE_AND_DEFAULTS = [name for name, job in JOBS.items() if job.variant in ("bare", "everything")]
QUICKLY = [RAW, DEFAULTS, "Accelerate", "Lightning, its defaults"]


@dataclass(frozen=True)
class Event:
    """A table: which of `JOBS` train what of `job`, and the time of a reading that is shown."""

    names: Sequence[str]
    job: Job
    time: str
    unit: str
    ranks: int = 1

    def measure(self, name: str, is_quick: bool = False) -> Reading:
        """Measure a contestant; of several ranks, the mean times and the largest memory."""
        contestant, variant, fused = JOBS[name].contestant, JOBS[name].variant, JOBS[name].fused
        job = replace(self.job, contestant=contestant, variant=variant, fused=fused)
        if is_quick:
            job = replace(job, warmup=job.warmup // 20, steps=job.steps // 20, epoch=100)
        readings: list[Reading] = measure("contestants.py", job, STEADY_PEAKS, self.ranks)
        means = {key: sum(column(readings, key)) / self.ranks for key in readings[0]}
        return means | {key: max(column(readings, key)) for key in ("first_step_s", "peak_mib")}

    def table(self, rounds: Mapping[str, Sequence[Reading]]) -> str:
        """Time per step, difference from the hand-written loop, first step, peak memory."""
        head = ["", self.unit, "more than the loop", "ratio", "first step, s more"]
        rows = [self._row(name, rounds[name], rounds[RAW]) for name in rounds]
        return report.table([*head, "peak memory, MB", "ratio"], rows)

    def _row(self, name: str, readings: Sequence[Reading], raw: Sequence[Reading]) -> list[str]:
        scale, digits = (1e3, 1) if "µs" in self.unit else (1.0, 2)
        times, raw_times = (
            [time * scale for time in column(results, self.time)] for results in (readings, raw)
        )
        first, raw_first = (column(results, "first_step_s") for results in (readings, raw))
        peaks, raw_peaks = (column(results, "peak_mib") for results in (readings, raw))
        peak = spread([mib * 2**20 / 1e6 for mib in peaks], 0)
        if name == RAW:
            return [name, spread(times, digits), "", "", f"{spread(first, 2)} total", peak, ""]
        return [
            name,
            spread(times, digits),
            spread(differences(times, raw_times), digits, sign=True),
            f"{median(ratios(times, raw_times)):.2f}",
            spread(differences(first, raw_first), 2, sign=True),
            peak,
            f"{median(ratios(peaks, raw_peaks)):.3f}",
        ]


MLP, GPT = Job("", warmup=1000, steps=4000), Job("", subject="transformer", warmup=20, steps=80)
UNFUSED = [name for name in BARE_AND_DEFAULTS if not JOBS[name].fused]
EVENTS = {
    "mlp": Event([*JOBS], MLP, "step_ms", "µs per step"),
    "transformer": Event(BARE_AND_DEFAULTS, GPT, "step_ms", "ms per step"),
    "ranks": Event(UNFUSED, replace(MLP, warmup=500, steps=2000), "cpu_ms", "CPU µs per step", 2),
}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=[*EVENTS])
    options = parser.parse_args()
    if options.rounds < 5 and not options.quick:
        parser.error("--rounds: medians of less than five say nothing")
    page = report.Page(options, "benchmarks")
    everyone = [(event, name) for event in options.events for name in EVENTS[event].names]
    few = [(event, name) for event, name in everyone if name in QUICKLY]
    # Before the rounds, this fills caches and compiles modules.
    rounds = play(few, lambda pair: EVENTS[pair[0]].measure(pair[1], is_quick=True), 1)
    if not options.quick:
        rounds = play(everyone, lambda pair: EVENTS[pair[0]].measure(pair[1]), options.rounds)
    count = 1 if options.quick else options.rounds
    machine = report.machine("torch", "lightning", "accelerate", more=f"{count} rounds.")
    sections = {"machine": machine}
    for event in options.events:
        by_name = {name: readings for (of, name), readings in rounds.items() if of == event}
        check_losses(by_name, RAW, ratio=0.25, more=0.02)
        sections[event] = EVENTS[event].table(by_name)
    page.publish(sections, plot(rounds) if "mlp" in options.events else "")


def plot(rounds: Mapping[tuple[str, str], Sequence[Reading]]) -> str:
    """Bars of the time per step of the MLP more than the hand-written loop's, as an SVG."""
    raw = column(rounds["mlp", RAW], "step_ms")
    more = {
        name.replace("*", ""): 1e3 * median(differences(column(readings, "step_ms"), raw))
        for (event, name), readings in rounds.items()
        if event == "mlp" and not name.startswith(RAW) and not JOBS[name].fused
    }
    height = 20 + 26 * len(more)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height}" font-size="13"'
        f' width="800" height="{height}" font-family="sans-serif">',
        f'<rect width="800" height="{height}" fill="white"/>',
    ]
    for row, (name, value) in enumerate(more.items()):
        y, width = 10 + 26 * row, max(1.0, 380 * value / max(more.values()))
        color = "#d9480f" if "bundled" in name else "#868e96"
        lines += [
            f'<text x="320" y="{y + 14}" text-anchor="end">{name}</text>',
            f'<rect x="330" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>',
            f'<text x="{336 + width:.1f}" y="{y + 14}">{value:+.0f} µs</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    main()
