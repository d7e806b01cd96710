"""Measures checkpoints beside torch.distributed.checkpoint, and writes docs/checkpoints.md.

A billion parameters in float32 with Adam's moments, sharded over 8 processes, need 18 GB of memory
and 40 GB of disk; smaller models: --parameters. It also prints the table of what checksums cost,
that of docs/reliability.md of a project. It runs in the environment of a rendered project: `make
bench-checkpoints`.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import report
from checkpoint_rank import TRAINER, UNSUMMED, Job
from child import FREED_IS_RETURNED, measure
from meter import require_memory
from report import table
from rounds import ratios, spread

SCRIPT = "checkpoint_rank.py"
LAYERS = 60
# Of each parameter: itself, two moments, and what processes need besides.
NEEDED_BYTES = 18

Round = Mapping[str, Mapping[str, float]]
ByRank = Sequence[Sequence[Round]]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=3, help="three times as many of checksums")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--folder", type=report.writable, help="where to save; a temporary one")
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.rounds = 1e6, 1
    page = report.Page(options, "checkpoints")
    require_memory(NEEDED_BYTES * options.parameters, "--parameters")
    sections = {}
    for name in options.only:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            sections[name] = SECTIONS[name](options, folder)
    print(sections.pop("checksums", ""), end="\n\n")
    load = f"Load average {os.getloadavg()[1]:.0f}. Medians of {options.rounds} rounds, with the"
    more = f"{load} minimum and maximum in parentheses."
    page.publish({"machine": report.machine("torch", more=more), **sections})


def checksums(options: argparse.Namespace, folder: str) -> str:
    """The table of what checksums cost: 100 million parameters, in one process."""
    width = 100 if options.quick else 1000
    job = Job(folder, 3 * options.rounds, width, 100, contestants=(TRAINER, UNSUMMED))
    by_rank = measure(SCRIPT, job, {})
    without, summed, verified = (
        _most(by_rank, name, "seconds")
        for name in (f"save, {UNSUMMED}", f"save, {TRAINER}", "verify")
    )
    rows = {
        "save without checksums, s": without,
        "save with checksums, s": summed,
        f"ratio within a round, of {job.rounds}": ratios(summed, without),
        "verify all checksums, s": verified,
    }
    title = f"{job.parameters / 1e6:g} million parameters with Adam's moments"
    cells = [[name, spread(values, 2)] for name, values in rows.items()]
    return table([title, "median (min … max)"], cells)


def large(options: argparse.Namespace, folder: str) -> str:
    """The section of a large model on several processes."""
    ranks = 2 if options.quick else 8
    width = math.isqrt(int(options.parameters) // LAYERS)
    job = Job(folder, options.rounds, width, LAYERS)
    by_rank = measure(SCRIPT, job, FREED_IS_RETURNED, ranks)
    share = job.parameters / ranks / 2**20
    sizes = (
        f"{12 * job.parameters / 1e9:.3g} GB in all; a rank has {12 * share:.0f} MiB, "
        f"{8 * share:.0f} of them moments. The largest tensor has {4 * width**2 / 2**20:.0f} MiB."
    )
    title = f"## {job.parameters / 1e9:.3g} billion parameters on {ranks} processes"
    return "\n\n".join([title, sizes, _table(by_rank)])


def many(options: argparse.Namespace, folder: str) -> str:
    """The section of many small tensors in one process."""
    job = Job(folder, options.rounds, 8, tensors=100 if options.quick else 10_000)
    by_rank = measure(SCRIPT, job, FREED_IS_RETURNED)
    seconds, cpu = (spread(_most(by_rank, "open", kind), 2) for kind in ("seconds", "cpu"))
    title = f"## {job.tensors:,} small tensors with Adam's moments, one process"
    opening = f"To open the checkpoint and read its table: {seconds} s; CPU {cpu} s."
    return "\n\n".join([title, _table(by_rank), opening])


def stalls(options: argparse.Namespace, folder: str) -> str:
    """The table of how long a save holds up a step."""
    model = "memory_quick" if options.quick else "memory"
    by_rank = measure(SCRIPT, Job(folder, options.rounds, model=model), FREED_IS_RETURNED)
    sync, later, first = (
        _most(by_rank, *keys)
        for keys in (("sync", "others"), ("async", "others"), ("async", "first"))
    )
    percent = [100 * ratio for ratio in ratios(later, sync)]
    rows = [
        ["a synchronous save, s", spread(sync, 2)],
        ["stall by an asynchronous save, s", spread(later, 3)],
        ["ratio within a round, %", spread(percent, 1)],
        ["stall by the first asynchronous save of a run, s", spread(first, 2)],
    ]
    return table(["", ""], rows)


SECTIONS = {"checksums": checksums, "large": large, "many": many, "stalls": stalls}


def _table(by_rank: ByRank) -> str:
    head = ["", "s", "ratio", "CPU s", "ratio", "peak memory, MiB"]
    return table(head, _rows(by_rank))


def _rows(by_rank: ByRank) -> Iterator[list[str]]:
    for name in sorted(by_rank[0][0].keys() - {"open"}, key=_place):
        seconds = spread(_most(by_rank, name, "seconds"), 2)
        if name == "verify":
            yield [name, seconds, "", "", "", ""]
            continue
        cpu, peak = _most(by_rank, name, "cpu"), _most(by_rank, name, "added")
        wall_ratio, cpu_ratio = (_ratio(by_rank, name, kind) for kind in ("seconds", "cpu"))
        yield [name, seconds, wall_ratio, spread(cpu, 2), cpu_ratio, spread(peak, 1)]


def _place(name: str) -> tuple[bool, bool, str]:
    """Saves come first, and of these the trainer's."""
    return not name.startswith("save"), "torch" in name, name


def _most(by_rank: ByRank, name: str, kind: str) -> list[float]:
    """Of each round, that of the rank with the most."""
    return [max(rank[name][kind] for rank in ranks) for ranks in zip(*by_rank, strict=True)]


def _ratio(by_rank: ByRank, name: str, kind: str) -> str:
    """Of the trainer to the faster of torch's variants, within each round."""
    if not name.endswith(TRAINER):
        return ""
    variants = [key for key in by_rank[0][0] if key.startswith(name.replace(TRAINER, "torch"))]
    columns = (_most(by_rank, variant, kind) for variant in variants)
    fastest = [min(values) for values in zip(*columns, strict=True)]
    return spread(ratios(_most(by_rank, name, kind), fastest), 2)


if __name__ == "__main__":
    main()
