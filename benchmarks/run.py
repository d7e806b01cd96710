"""Measures all contestants, alternating, and writes docs/benchmarks.md.

python benchmarks/run.py           all of it: seven rounds, about twenty minutes
python benchmarks/run.py --quick   a smoke run of two minutes; writes nothing
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import report
from child import measure
from folders import writable
from meter import Job
from render import BUILD, ROOT, render_project, time_render
from report import Rounds


@dataclass(frozen=True)
class Length:
    """Steps of one measurement."""

    warmup: int
    steps: int
    epoch: int


@dataclass(frozen=True)
class Event:
    """A table of the report: a subject, a number of processes, and who takes part."""

    name: str
    subject: str
    ranks: int
    length: Length
    quick: Length
    entries: tuple[str, ...]
    smoke: tuple[str, ...]
    """Entries of a smoke run."""


# Contestant, variant, and "fused" for PyTorch's one-kernel AdamW in place of its default one.
EVERYONE = (
    "raw bare",
    "bundled bare",
    "bundled logging",
    "bundled everything",
    "bundled numbers",
    "accelerate_ bare",
    "lightning_ bare",
    "lightning_ logging",
    "lightning_ everything",
)
FUSED = ("raw bare fused", "bundled everything fused")
SOME = tuple(entry for entry in EVERYONE if entry.split()[1] not in ("logging", "numbers"))
# A smoke run starts each contestant once for each number of processes.
SMOKE = ("raw bare", "bundled everything", "accelerate_ bare", "lightning_ everything")
MLP = Length(1000, 4000, 1000), Length(50, 150, 100)
TRANSFORMER = Length(20, 80, 1000), Length(2, 4, 10)
RANKS = Length(500, 2000, 1000), Length(50, 100, 100)

EVENTS = (
    Event("mlp", "mlp", 1, *MLP, EVERYONE + FUSED, SMOKE),
    Event("transformer", "transformer", 1, *TRANSFORMER, SOME + FUSED, SMOKE[:2]),
    Event("ranks", "mlp", 2, *RANKS, SOME, SMOKE),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round, nothing written")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--events", nargs="+", choices=[*(e.name for e in EVENTS), "render"])
    parser.add_argument("--skip", nargs="+", default=[], help="contestants to leave out")
    parser.add_argument("--out", type=writable, default=ROOT / "docs", help="folder of the report")
    options = parser.parse_args()
    if options.rounds < 5 and not options.quick:
        parser.error("--rounds: medians of less than five say nothing")

    source = render_project()
    wanted = options.events or [*(event.name for event in EVENTS), "render"]
    events = [event for event in EVENTS if event.name in wanted]
    rounds: Rounds = {}
    if not options.quick:
        play(events, source, {}, quick=True, skip=options.skip)  # fills caches, compiles modules
    for number in range(1 if options.quick else options.rounds):
        print(f"round {number + 1}", file=sys.stderr)
        # Every other round runs backwards, so that a machine that slows down favors nobody.
        ordered = events[::-1] if number % 2 else events
        play(ordered, source, rounds, options.quick, options.skip, reverse=bool(number % 2))
        if "render" in wanted:
            for name, one_file in (("template", False), ("one file", True)):
                seconds = time_render(one_file)
                rounds.setdefault("render", {}).setdefault(name, []).append({"s": seconds})
        # As it goes, so that a failure in a late round does not cost the earlier ones.
        (BUILD / "rounds.json").write_text(json.dumps(rounds, indent=1))
    check(rounds)
    text = report.markdown(rounds)
    print(text)
    if not options.quick:
        (options.out / "benchmarks.md").write_text(text)
        (options.out / "benchmarks.svg").write_text(report.plot(rounds))


def play(
    events: list[Event],
    source: Path,
    rounds: Rounds,
    quick: bool,
    skip: list[str],
    reverse: bool = False,
) -> None:
    """One round: every entry of every event once."""
    for event in events:
        length = event.quick if quick else event.length
        entries = list(event.smoke if quick else event.entries)
        for entry in entries[::-1] if reverse else entries:
            contestant, variant, *fused = entry.split()
            if contestant in skip:
                continue
            job = Job(
                contestant=contestant,
                variant=variant,
                subject=event.subject,
                fused=bool(fused),
                warmup=length.warmup,
                steps=length.steps,
                epoch=length.epoch,
            )
            result = measure(job, event.ranks, source)
            print(f"  {event.name:12} {entry:24} {result['step_us']:9.1f} µs", file=sys.stderr)
            rounds.setdefault(event.name, {}).setdefault(entry, []).append(result)


def check(rounds: Rounds) -> None:
    """Everyone must have come near the same loss, or they did not do the same work."""
    for event, entries in rounds.items():
        for entry, results in entries.items():
            for mine, raw in zip(results, entries.get("raw bare", []), strict=False):
                loss, expected = mine["final_loss"], raw["final_loss"]
                if abs(loss - expected) > 0.25 * expected + 0.02:
                    raise SystemExit(
                        f"{event}: {entry} ends at {loss:.3f}, not near {expected:.3f}"
                    )


if __name__ == "__main__":
    main()
