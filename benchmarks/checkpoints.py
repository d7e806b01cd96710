"""Measures checkpoints beside torch.distributed.checkpoint, and writes docs/checkpoints.md.

PYTHONPATH=PROJECT/src python benchmarks/checkpoints.py           a billion parameters
PYTHONPATH=PROJECT/src python benchmarks/checkpoints.py --quick   a smoke run; writes nothing

A billion parameters in float32 with Adam's moments, sharded over 8 processes, need 18 GB of memory
and 40 GB of disk; smaller models: --parameters. It also prints the table of what checksums cost,
that of docs/reliability.md of a project. It runs in the environment of a rendered project: `make
bench-checkpoints`.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import report
from checkpoint_rank import TRAINER, Job
from child import FREED_IS_RETURNED, measure, require_memory
from rounds import column, ratios, spread

SCRIPT = "checkpoint_rank.py"
TIMEOUT = 3600  # seconds
LAYERS = 60
# Of each parameter: itself, two moments, and what processes need besides.
NEEDED_BYTES = 18

Round = Mapping[str, Mapping[str, float]]
ByRank = Sequence[Sequence[Round]]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=10_000, help="of the model of many tensors")
    parser.add_argument("--rounds", type=int, default=3, help="three times as many of checksums")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--folder", type=report.writable, help="where to save; a temporary one")
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.ranks, options.tensors, options.rounds = 1e6, 2, 100, 1
    page = report.Page(options, "checkpoints")
    require_memory(NEEDED_BYTES * options.parameters, "--parameters")
    parts = {}
    for what in options.only:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            parts[what] = PARTS[what](options, folder)
    print(parts.pop("checksums", ""), end="\n\n")
    load = f"Load average {os.getloadavg()[1]:.0f}. Medians of {options.rounds} rounds, with the"
    more = f"{load} minimum and maximum in parentheses."
    page.publish({"machine": report.machine("torch", more=more), **parts})


def checksums(options: argparse.Namespace, folder: str) -> str:
    """The table of what checksums cost: 100 million parameters, in one process."""
    width = 100 if options.quick else 1000
    job = Job("checksums", folder, 3 * options.rounds, width, tensors=100)
    (found,) = measure(SCRIPT, job, {}, timeout=TIMEOUT)
    without, with_them = column(found, "without"), column(found, "with")
    rows = {
        "save without checksums, s": without,
        "save with checksums, s": with_them,
        f"ratio within a round, of {len(found)}": ratios(with_them, without),
        "verify all checksums, s": column(found, "check"),
    }
    title = f"{job.parameters / 1e6:g} million parameters with Adam's moments"
    cells = [[name, spread(values, 2)] for name, values in rows.items()]
    return report.table([title, "median (min … max)"], cells)


def large(options: argparse.Namespace, folder: str) -> str:
    """The section of a large model on several processes."""
    width = math.isqrt(int(options.parameters) // LAYERS)
    job = Job("resumes", folder, options.rounds, width, LAYERS)
    by_rank = measure(SCRIPT, job, FREED_IS_RETURNED, options.ranks, TIMEOUT)
    share = job.parameters / options.ranks / 2**20
    is_large = job.parameters > 9.99e8  # a square width is seldom a round number
    size = f"{job.parameters / (1e9 if is_large else 1e6):.3g} {'b' if is_large else 'm'}illion"
    return "\n\n".join(
        [
            f"## {size.capitalize()} parameters on {options.ranks} processes",
            f"{12 * job.parameters / 1e9:.3g} GB in all; a rank has {12 * share:.0f} MiB, "
            f"{8 * share:.0f} of them moments. The largest tensor has "
            f"{4 * job.width**2 / 2**20:.0f} MiB.",
            _table(by_rank),
        ]
    )


def many(options: argparse.Namespace, folder: str) -> str:
    """The section of many small tensors in one process."""
    job = Job("resumes", folder, options.rounds, width=8, tensors=options.tensors)
    by_rank = measure(SCRIPT, job, FREED_IS_RETURNED, timeout=TIMEOUT)
    seconds, cpu = (_most(by_rank, "open", kind) for kind in ("seconds", "cpu"))
    return "\n\n".join(
        [
            f"## {options.tensors:,} small tensors with Adam's moments, one process",
            _table(by_rank),
            f"To open the checkpoint and read its table: {spread(seconds, 2)} s; CPU "
            f"{spread(cpu, 2)} s.",
        ]
    )


def _table(by_rank: ByRank) -> str:
    head = ["", "s", "ratio", "CPU s", "ratio", "peak memory, MiB"]
    return report.table(head, _rows(by_rank))


def _rows(by_rank: ByRank) -> Iterator[list[str]]:
    for what in sorted(by_rank[0][0].keys() - {"open"}, key=_place):
        seconds = spread(_most(by_rank, what, "seconds"), 2)
        if what == "verify":
            yield [what, seconds, "", "", "", ""]
            continue
        beside = ["", ""]
        if what.endswith(TRAINER):
            beside = [_ratio(by_rank, what, kind) for kind in ("seconds", "cpu")]
        cpu, added = (
            spread(_most(by_rank, what, "cpu"), 2),
            spread(_most(by_rank, what, "added"), 1),
        )
        yield [what, seconds, beside[0], cpu, beside[1], added]


def _place(what: str) -> tuple[bool, bool, str]:
    """Saves come first, and of these the trainer's."""
    return not what.startswith("save"), "torch" in what, what


def _most(by_rank: ByRank, what: str, kind: str) -> list[float]:
    """Of each round, that of the rank with the most."""
    return [max(rank[what][kind] for rank in ranks) for ranks in zip(*by_rank, strict=True)]


def _ratio(by_rank: ByRank, what: str, kind: str) -> str:
    """Within each round, to the faster of torch's variants."""
    start = what.removesuffix(TRAINER)
    others = [each for each in by_rank[0][0] if each.startswith(start) and each != what]
    best = [min(each) for each in zip(*(_most(by_rank, o, kind) for o in others), strict=True)]
    return spread(ratios(_most(by_rank, what, kind), best), 2)


def stalls(options: argparse.Namespace, folder: str) -> str:
    """The table of how long a save holds up a step."""
    model = "memory_quick" if options.quick else "memory"
    job = Job("stalls", folder, options.rounds, model=model)
    found = measure(SCRIPT, job, FREED_IS_RETURNED, timeout=TIMEOUT)
    sync, asynchronous, first = (
        _most(found, *names)
        for names in (("sync", "others"), ("async", "others"), ("async", "first"))
    )
    percent = [100 * ratio for ratio in ratios(asynchronous, sync)]
    rows = {
        "a synchronous save, s": spread(sync, 2),
        "stall by an asynchronous save, s": spread(asynchronous, 3),
        "ratio within a round, %": spread(percent, 1),
        "stall by the first asynchronous save of a run, s": spread(first, 2),
    }
    return report.table(["", ""], [[*row] for row in rows.items()])


PARTS = {"checksums": checksums, "large": large, "many": many, "stalls": stalls}


if __name__ == "__main__":
    main()
