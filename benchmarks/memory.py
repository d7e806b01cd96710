"""Measures the memory of a rank under every strategy that divides it, and writes docs/memory.md.

PYTHONPATH=PROJECT/src python benchmarks/memory.py           all of it: three rounds, half an hour
PYTHONPATH=PROJECT/src python benchmarks/memory.py --quick   a smoke run of a minute; writes nothing

It runs in the environment of a rendered project, which has the engines: `make bench-memory`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from my_project_trainer import ConfigurationError, Trainer
from my_project_trainer.strategies import names

import report
from child import FREED_IS_RETURNED
from child import measure as measured
from job import SIZES, Size
from plots import LIGHT, ORANGE, Bar, bars
from rounds import Reading, check_losses, column, middle, play, ratios, spread

BOUND = 1.05  # times the memory of the plain script
SCRIPT_RANKS = 4
KINDS = ("parameters", "gradients", "optimizer")
QUICKLY = ("ddp", "ddp_zero1")
TIMEOUT = 300  # seconds; a measurement takes about twenty


@dataclass(frozen=True)
class Entry:
    """A strategy as it is measured.

    Args:
        sharded: which of parameters, gradients and optimizer state are sharded over the ranks.
        script: MiB above the base that a plain script took on four ranks, for a model of as
            many parameters: after a step, and at most. FSDP2's still held its gradients after a
            step.
        imports: loaded before anything is read.
        optimizer_bytes: of optimizer state a parameter: Adam's two numbers, and an engine's copy.
    """

    sharded: tuple[bool, bool, bool]
    script: tuple[float, float]
    imports: tuple[str, ...] = ()
    optimizer_bytes: int = 8

    def theory(self, parameters: int, ranks: int) -> dict[str, float]:
        """MiB of parameters, gradients and optimizer state on a rank."""
        sizes = dict(zip(KINDS, (4, 4, self.optimizer_bytes), strict=True))
        return {
            kind: size * parameters / (ranks if sharded else 1) / 2**20
            for (kind, size), sharded in zip(sizes.items(), self.sharded, strict=True)
        }


NOTHING, ALL = (False, False, False), (True, True, True)
OPTIMIZER, GRADIENTS = (False, False, True), (False, True, True)
# The engines' code is loaded before. In fp32 too DeepSpeed steps a copy of the parameters.
FAIRSCALE = ("fairscale.nn", "fairscale.optim")
DEEPSPEED: dict[str, Any] = {"imports": ("deepspeed",), "optimizer_bytes": 12}

ENTRIES = {
    "ddp": Entry(NOTHING, (1542, 1590)),
    "ddp_zero1": Entry(OPTIMIZER, (965, 1013)),
    "ddp_sharded": Entry(GRADIENTS, (725, 900), imports=FAIRSCALE),
    "deepspeed_stage_1": Entry(OPTIMIZER, (724, 1142), **DEEPSPEED),
    "deepspeed_stage_2": Entry(GRADIENTS, (724, 1107), **DEEPSPEED),
    "deepspeed_stage_3": Entry(ALL, (535, 1001), **DEEPSPEED),
    "fsdp": Entry(ALL, (394, 454), imports=("torch.distributed.fsdp",)),
}

Table = Mapping[str, Sequence[Reading]]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a measurement")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=ENTRIES)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.ranks, options.steps = 1, [2], 2
    page = report.Page(options, "memory")
    entries, left_out = available(options.only or (QUICKLY if options.quick else ENTRIES))
    print(*left_out, sep="\n", file=sys.stderr)
    model = "memory_quick" if options.quick else "memory"
    found = play(
        [(ranks, name) for name in entries for ranks in options.ranks],
        lambda each: measure(each[1], each[0], model=model, steps=options.steps),
        options.rounds,
    )
    tables: dict[int, Table] = {
        ranks: {name: found[ranks, name] for name in entries}
        for ranks in sorted(options.ranks, reverse=True)
    }
    for table in tables.values():
        check_losses(table, "ddp", part=1e-3)
    parts = {
        "machine": machine(options.rounds, SIZES[model]),
        "tables": "\n\n".join(
            section(table, SIZES[model], ranks) for ranks, table in tables.items()
        ),
        "left out": "\n".join(left_out) or "No strategy was left out.",
    }
    page.publish(parts, plot(tables))


def available(wanted: Sequence[str] | Mapping[str, Entry]) -> tuple[list[str], list[str]]:
    """Those that can run here, and a line for each that cannot."""
    found, lines = [], []
    for name in wanted:
        try:
            if name not in names():
                raise ConfigurationError("the trainer has no such strategy")
            # Its check names a package that is missing.
            Trainer(accelerator="cpu", devices=2, strategy=name, max_steps=1)
        except ConfigurationError as error:
            lines.append(f"{name} is left out: {error}")
        else:
            found.append(name)
    return found, lines


def measure(name: str, ranks: int, **more: Any) -> Reading:
    """Train on `ranks` processes; of what they found, the largest memory and the mean time."""
    job = {"strategy": name, "imports": ENTRIES[name].imports, **more}
    results: list[Reading] = measured(
        "memory_rank.py", job, FREED_IS_RETURNED, ranks, timeout=TIMEOUT
    )
    most = {key: max(column(results, key)) for key in results[0]}
    return most | {key: sum(column(results, key)) / ranks for key in ("step_s", "loss")}


def machine(rounds: int, size: Size) -> str:
    """When, on what, and what was trained."""
    return report.machine(
        *("torch", "fairscale", "deepspeed"),
        more=f"{rounds} rounds. A GPT of {size.parameters / 1e6:.1f} million parameters "
        f"({size.depth} blocks, {size.width} wide), one sequence of {size.context} tokens per rank "
        "and step. Memory in MiB; medians of the rounds, with the minimum and maximum in "
        "parentheses.",
    )


def section(table: Table, size: Size, ranks: int) -> str:
    """The tables of so many ranks."""
    head = ["", "expected", "steady", "plain script", "peak", "plain script", "peak of setup"]
    resident = [_resident(name, table, size, ranks) for name in table]
    composed = [_composition(name, table[name], size, ranks) for name in table]
    kinds = ["parameters, expected", "gradients, expected", "optimizer state, expected"]
    return "\n\n".join(
        [
            f"## {ranks} ranks",
            report.table([*head, "s per step", "ratio"], resident),
            f"### Composition, {ranks} ranks",
            report.table(["", *(word for kind in kinds for word in (kind, "counted"))], composed),
        ]
    )


def _resident(name: str, table: Table, size: Size, ranks: int) -> list[str]:
    results, entry = table[name], ENTRIES[name]
    cells = [name, f"{sum(entry.theory(size.parameters, ranks).values()):.0f}"]
    for key, script in zip(("steady", "peak"), entry.script, strict=True):
        part = middle(results, key) / script
        ratio = f"{script:.0f}, ratio {report.bold(f'{part:.2f}', part > BOUND)}"
        cells += [spread(column(results, key), 0), ratio if ranks == SCRIPT_RANKS else ""]
    cells += [spread(column(results, "set_up"), 0), spread(column(results, "step_s"), 2)]
    if "ddp" not in table:
        return [*cells, ""]
    beside = ratios(column(results, "step_s"), column(table["ddp"], "step_s"))
    return [*cells, f"{median(beside):.2f}"]


def _composition(name: str, results: Sequence[Reading], size: Size, ranks: int) -> list[str]:
    theory = ENTRIES[name].theory(size.parameters, ranks)
    both = [(theory[kind], middle(results, kind)) for kind in KINDS]
    return [name, *(f"{value:.0f}" for pair in both for value in pair)]


def plot(tables: Mapping[int, Table]) -> str:
    """Bars of peak and, in front of them, steady memory with the most ranks, as an SVG."""
    rows = []
    for name, results in tables[max(tables)].items():
        peak, steady = middle(results, "peak"), middle(results, "steady")
        text = f"{steady:.0f}, peak {peak:.0f} MiB"
        rows.append(Bar(name, {LIGHT: peak, ORANGE: steady}, text))
    title = f"Memory of a rank above its base, {max(tables)} ranks"
    return bars(rows, left=160, title=title)


if __name__ == "__main__":
    main()
