"""Measures the memory of a rank under every strategy that divides it, and writes docs/memory.md.

It runs in the environment of a rendered project, which has the engines: `make bench-memory`.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from my_project_trainer import ConfigurationError, Trainer

import child
import report
from job import SIZES, Size
from rounds import Reading, check_losses, column, middle, play, ratios, spread

BOUND = 1.05  # times the memory of the plain script
SCRIPT_RANKS = 4
QUICKLY = ("ddp", "ddp_zero1")


@dataclass(frozen=True)
class Entry:
    """A strategy, which shards some of parameters, gradients and optimizer state over the ranks.

    `script`: MiB above the base that a plain script took on four ranks, for a model of as many
    parameters: after a step, and at most. FSDP2's still held its gradients after a step.
    Optimizer state is Adam's two numbers of a parameter, and an engine's copy of it.
    """

    sharded: tuple[bool, bool, bool]
    script: tuple[float, float]
    imports: tuple[str, ...] = ()
    optimizer_bytes: int = 8

    def expected(self, parameters: int, ranks: int) -> float:
        """MiB of parameters, gradients and optimizer state on a rank."""
        sizes = zip((4, 4, self.optimizer_bytes), self.sharded, strict=True)
        of_parameter = sum(size / (ranks if is_sharded else 1) for size, is_sharded in sizes)
        return of_parameter * parameters / 2**20


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
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=ENTRIES)
    options = parser.parse_args()
    model, steps, default = "memory", 5, [*ENTRIES]
    if options.quick:
        options.rounds, options.ranks = 1, [2]
        model, steps, default = "memory_quick", 2, [*QUICKLY]
    page = report.Page(options, "memory")
    strategies, left_out = available(options.only or default)
    print(*left_out, sep="\n", file=sys.stderr)
    rounds = play(
        [(ranks, name) for name in strategies for ranks in options.ranks],
        lambda pair: measure(pair[1], pair[0], model=model, steps=steps),
        options.rounds,
    )
    tables: dict[int, Table] = {
        ranks: {name: rounds[ranks, name] for name in strategies}
        for ranks in sorted(options.ranks, reverse=True)
    }
    for table in tables.values():
        check_losses(table, "ddp", ratio=1e-3)
    size = SIZES[model]
    what = (
        f"{options.rounds} rounds. A GPT of {size.parameters / 1e6:.1f} million parameters "
        f"({size.depth} blocks, {size.width} wide), one sequence of {size.context} tokens per rank "
        "and step. Memory in MiB; medians of the rounds, with the minimum and maximum in "
        "parentheses."
    )
    sections = {
        "machine": report.machine("torch", "fairscale", "deepspeed", more=what),
        "tables": "\n\n".join(section(table, size, ranks) for ranks, table in tables.items()),
        "left out": "\n".join(left_out) or "No strategy was left out.",
    }
    page.publish(sections)


def available(strategies: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those that can run here, and a line for each that cannot."""
    can_run, left_out = [], []
    for name in strategies:
        try:
            # Its check names a package or an engine that is missing.
            Trainer(accelerator="cpu", devices=2, strategy=name, max_steps=1)
        except ConfigurationError as error:
            left_out.append(f"{name} is left out: {error}")
        else:
            can_run.append(name)
    return can_run, left_out


def measure(name: str, ranks: int, **more: Any) -> Reading:
    """Train on `ranks` processes; return the largest memory of a rank and the mean time."""
    job = {"strategy": name, "imports": ENTRIES[name].imports, **more}
    results: list[Reading] = child.measure("memory_rank.py", job, child.FREED_IS_RETURNED, ranks)
    most = {key: max(column(results, key)) for key in results[0]}
    return most | {key: sum(column(results, key)) / ranks for key in ("step_s", "loss")}


def section(table: Table, size: Size, ranks: int) -> str:
    """The table of so many ranks."""
    head = ["", "expected", "steady", "plain script", "peak", "plain script", "peak of setup"]
    rows = []
    for name, readings in table.items():
        expected = ENTRIES[name].expected(size.parameters, ranks)
        script = ENTRIES[name].script if ranks == SCRIPT_RANKS else None
        memory = [name, f"{expected:.0f}", *_beside_script(readings, script)]
        rows.append([*memory, *_times(readings, table.get("ddp"))])
    return f"## {ranks} ranks\n\n{report.table([*head, 's per step', 'ratio'], rows)}"


def _beside_script(
    readings: Sequence[Reading], script: tuple[float, float] | None
) -> Iterable[str]:
    """Steady and peak memory, each with the plain script's, and that of the setup."""
    for index, key in enumerate(("steady", "peak")):
        yield spread(column(readings, key), 0)
        if script is None:
            yield ""
        else:
            ratio = middle(readings, key) / script[index]
            yield f"{script[index]:.0f}, ratio {report.bold(f'{ratio:.2f}', ratio > BOUND)}"
    yield spread(column(readings, "set_up"), 0)


def _times(readings: Sequence[Reading], ddp: Sequence[Reading] | None) -> tuple[str, str]:
    """The time of a step, and its ratio to that of ddp."""
    times = column(readings, "step_s")
    ratio = f"{median(ratios(times, column(ddp, 'step_s'))):.2f}" if ddp else ""
    return spread(times, 2), ratio


if __name__ == "__main__":
    main()
