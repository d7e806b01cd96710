"""The strategies that are checked on one GPU, at world size 1, and how far each may be off."""

from typing import Any

import pytest

from my_project.trainer import strategies as registry

from ..conformance.matrix import MATRIX, PORTABLE

# The largest difference of a weight or a loss from the CPU's in float32. Half precision rounds by
# 2^-9 (bfloat16) and 2^-12 (float16) of a value; in the "-true" ones weights too, in each step.
BOUNDS = {
    "32-true": 2e-5,
    "bf16-mixed": 2e-2,
    "16-mixed": 1e-3,
    "bf16-true": 3e-2,
    "16-true": 4e-3,
}
# The row of each strategy that has its name.
ROWS = {name: row for name, row in MATRIX.items() if row.strategy in (None, name)}


def engine(name: str) -> str | None:
    """The package that a strategy needs beside torch."""
    needed = ROWS[name].launches[0].engine
    return None if needed == "torch" else needed


def sharded() -> list[str]:
    """Strategies that shard parameters, each once."""
    return [name for name in PORTABLE if registry.create(name, {}).shards_parameters]


def by_engine() -> dict[str, list[str]]:
    """The strategies of each engine."""
    found: dict[str, list[str]] = {}
    for name in ROWS:
        if needed := engine(name):
            found.setdefault(needed, []).append(name)
    return found


def options(name: str) -> dict[str, Any]:
    """Of the trainer: the strategy, with units that fit the small model."""
    chosen: dict[str, Any] = {"strategy": name}
    if "unit_parameters" in registry.options_of(registry.find(name).cls):
        chosen["strategy_options"] = {"unit_parameters": 1000}
    return chosen


def refused(name: str) -> set[str]:
    """Precisions that a strategy refuses, which is tested elsewhere."""
    return set(registry.find(name).limits.refused)


def all_of(precisions: bool) -> list[Any]:
    """Parameters of a test: each strategy that can run here, with each precision if so asked."""
    found = []
    for name in sorted(ROWS):
        marks = [pytest.mark.needs(needed)] if (needed := engine(name)) else []
        # At world size 1 it is another strategy, and tried in few ways: one precision is enough.
        few = not precisions or len(ROWS[name].only) <= 3
        for precision in ["32-true"] if few else sorted(set(BOUNDS) - refused(name)):
            values = (name, precision) if precisions else (name,)
            found.append(pytest.param(*values, marks=marks, id="-".join(values)))
    return found
