"""What a rank of 8 and of 64 holds is what docs/memory.md expects."""

import json
from functools import cache
from itertools import product
from typing import Any

import pytest
from tests.project import succeed

from fake_group_subject import BLOCKS, CASES, NODE, WEIGHT, WORLDS
from torch_versions import fake_broadcast

MODEL = 2 * BLOCKS * WEIGHT
ENGINES = {"ddp_sharded": "fairscale"}
QUICK = ("ddp_zero1", "fsdp")
# Over how many of so many ranks parameters, gradients and optimizer states are sharded. A pipeline
# is left out: its stages ask their neighbors for shapes. So is stage 3: its ranks compare numbers.
SHARDS = {
    "ddp": lambda world: (1, 1, 1),
    "ddp_zero1": lambda world: (1, 1, world),
    "fsdp": lambda world: (world, world, world),
    "fsdp, whole": lambda world: (world, world, world),
    "hsdp": lambda world: (NODE, NODE, NODE),
    "mesh, tensor": lambda world: (8, 8, 8),
    "mesh, shards": lambda world: (world // 2,) * 3,
    "ddp_sharded": lambda world: (1, world, world),
}
# DDP keeps the memory of its gradients.
KEPT = {"ddp": MODEL, "ddp_zero1": MODEL}


def group_of(name: str, world: int) -> str:
    """What is measured in one process."""
    return "quick" if name in QUICK and world == WORLDS[-1] else ENGINES.get(name, "torch")


def marks(name: str, world: int) -> list[pytest.MarkDecorator]:
    decorators = [] if group_of(name, world) == "quick" else [pytest.mark.slow]
    if name in ("fsdp", "fsdp, whole"):
        decorators.append(fake_broadcast)
    return [*decorators, pytest.mark.needs(ENGINES[name])] if name in ENGINES else decorators


@pytest.fixture(scope="module")
def measured():
    """Measures the strategies of a group once; gives the bytes by name and world size."""

    @cache
    def results_of(group: str) -> dict[tuple[str, int], Any]:
        cases = [case for case in product(CASES, WORLDS) if group_of(*case) == group]
        names = [f"{name}/{world}" for name, world in cases]
        engine = group if group in ENGINES.values() else "torch"
        done = succeed(["-m", "fake_group_subject", *names], engine=engine)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return {(record["name"], record["world"]): record for record in map(json.loads, lines)}

    return results_of


@pytest.mark.parametrize(
    ("name", "world"), [pytest.param(*case, marks=marks(*case)) for case in product(CASES, WORLDS)]
)
def test_a_rank_holds_what_is_expected(measured, name: str, world: int) -> None:
    held = measured(group_of(name, world))[name, world]
    assert "error" not in held, held["error"]
    parameters, gradients, optimizer = SHARDS[name](world)
    assert held["before"] == {
        "parameters": MODEL // parameters,
        "gradients": MODEL // gradients,
        "optimizer": 2 * MODEL // optimizer,
        "rest": 0,
    }
    assert held["after"] == {**held["before"], "gradients": 0, "rest": KEPT.get(name, 0)}
