"""The strategies that are checked on one GPU, at world size 1, and how far each may be off."""

from collections.abc import Iterable
from typing import Any

import pytest

from my_project_trainer import strategies as registry

from ..conformance.matrix import ENGINES, MATRIX

# The largest difference of a weight or a loss from the CPU's in float32. Half precision rounds by
# 2^-9 (bfloat16) and 2^-12 (float16) of a value; in the "-true" ones weights too, in each step.
BOUNDS = {"32-true": 2e-5, "bf16-mixed": 2e-2, "16-mixed": 1e-3, "bf16-true": 3e-2, "16-true": 4e-3}
# The first row of each, which has its launches and the package that it needs.
ROWS = {
    strategy: row
    for name, row in reversed(MATRIX.items())
    if row.launches and (strategy := row.strategy or name) in registry.names()
}


def engine(name: str) -> str | None:
    """The package that a strategy needs besides torch."""
    needed = ROWS[name].launches[0].engine
    return None if needed == "torch" else needed


def engines() -> dict[str, list[str]]:
    """The strategies of each such package."""
    needed = {name: engine(name) for name in sorted(ROWS)}
    return {
        row.name: [name for name, package in needed.items() if package == row.name]
        for row in ENGINES
    }


def needing(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: strategies, each with the mark for the package that it needs."""
    return [
        pytest.param(name, marks=[pytest.mark.needs(needed)] if (needed := engine(name)) else [])
        for name in names
    ]


def options(name: str) -> dict[str, Any]:
    """Of the trainer: the strategy, with units that fit the small model."""
    chosen: dict[str, Any] = {"strategy": name}
    known = registry.options_of(registry.find(name).cls)
    if "unit_parameters" in known and "shard" not in known:  # a mesh of one process has no units
        chosen["strategy_options"] = {"unit_parameters": 1000}
    return chosen


def shards_parameters(name: str) -> bool:
    """Whether each process holds a part of the parameters only."""
    return registry.create(name, {}).limits.shards_parameters


def refused(name: str) -> set[str]:
    """Precisions that a strategy refuses, which is tested elsewhere."""
    return set(registry.find(name).limits.refused)


def all_of(precisions: bool) -> list[Any]:
    """Parameters of a test: each strategy that can run here, with each precision if so asked."""
    parameters = []
    for name in sorted(ROWS):
        marks = [pytest.mark.needs(needed)] if (needed := engine(name)) else []
        few = not precisions or ROWS[name].is_alias  # one precision is enough
        for precision in ["32-true"] if few else sorted(set(BOUNDS) - refused(name)):
            values = (name, precision) if precisions else (name,)
            parameters.append(pytest.param(*values, marks=marks, id="-".join(values)))
    return parameters
