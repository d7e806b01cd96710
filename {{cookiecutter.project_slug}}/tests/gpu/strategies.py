"""The strategies that are checked on one GPU, at world size 1, and how far each may be off."""

from typing import Any

import pytest

from my_project.trainer import strategies as registry

from ..conformance.matrix import MATRIX

# The largest difference of a weight or a loss from the CPU's in float32. Half precision rounds by
# 2^-9 (bfloat16) and 2^-12 (float16) of a value; in the "-true" ones weights too, in each step.
BOUNDS = {
    "32-true": 2e-5,
    "bf16-mixed": 2e-2,
    "16-mixed": 1e-3,
    "bf16-true": 3e-2,
    "16-true": 4e-3,
}
ENGINES = {
    "horovod": "horovod",
    "ddp_sharded": "fairscale",
    "ddp_sharded_spawn": "fairscale",
    "fairscale_fsdp": "fairscale",
}
# At world size 1 they are another strategy, and nothing else: one precision is enough.
ALIASES = ("ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_sharded_spawn", "deepspeed")


def engine(name: str) -> str | None:
    """The package that a strategy needs beside torch."""
    return "deepspeed" if name.startswith("deepspeed") else ENGINES.get(name)


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
    for name in sorted({row.strategy or key for key, row in MATRIX.items()}):
        marks = [pytest.mark.needs(needed)] if (needed := engine(name)) else []
        few = not precisions or name in ALIASES
        for precision in ["32-true"] if few else sorted(set(BOUNDS) - refused(name)):
            values = (name, precision) if precisions else (name,)
            found.append(pytest.param(*values, marks=marks, id="-".join(values)))
    return found
