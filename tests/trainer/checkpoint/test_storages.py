"""No strategy keeps casts of weights that it does not need, copies in a save, or asks in each step.

Counts are in weights, of which the model has eight. A rank that shards them over two has four.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.project import succeed

from storages_subject import CASES, LAYERS

ALL = 2 * LAYERS
ENGINES = ("fairscale", "deepspeed")
# Casts of weights that a forward leaves for its backward, at most. Autocast keeps one of each that
# a rank computes with; fsdp gathers again, and keeps those of the last unit.
CASTS = {
    "fsdp": 1,
    "fsdp, asynchronous save": 1,
    "fsdp, EMA": 1,
    "fsdp, called twice": 2,
    "fsdp, checkpointed": 2,
    "fsdp, checkpointed by unit": 2,
    "hsdp": 1,
    "mesh, shards": 1,
    "tensor_parallel": 1,
    **dict.fromkeys(("sequential", "sequential, gpipe", "sequential, EMA"), ALL / 2),
    "deepspeed_stage_3": 0,
}
# Copies that a save makes, in host memory, which is here the device's too: one of what the rank
# saves, with Adam's moments, if it is asynchronous. Engines that shard flattened parameters gather
# one tensor after the other, each for the rank that writes it: half of what is saved, the one that
# is gathered, and one more that gloo's thread may hold for a moment.
MOMENTS = 2 * ALL
COPIES = {"ddp, asynchronous save": ALL + MOMENTS, "fsdp, asynchronous save": (ALL + MOMENTS) / 2}
GATHERED = {
    **dict.fromkeys(("deepspeed_stage_1", "deepspeed_stage_2"), MOMENTS / 2),
    "deepspeed_stage_3": (ALL + MOMENTS) / 2,
}


def marks(group: str) -> list[pytest.MarkDecorator]:
    decorators = [pytest.mark.needs(group)] if group in ENGINES else []
    decorators += [] if group == "torch" else [pytest.mark.slow]
    return decorators


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory):
    """Trains the cases of a group once, and gives what was counted."""

    @cache
    def folder(group: str) -> Path:
        path = tmp_path_factory.mktemp("storages-")
        how = {"engine": group} if group in ENGINES else {}
        succeed(["-m", "storages_subject", path, group], **how)
        return path

    def of_case(group: str, name: str) -> dict[str, Any]:
        counts: dict[str, Any] = json.loads((folder(group) / f"{name}.json").read_text())
        return counts

    return of_case


def test_the_cases_are_those_of_the_tables() -> None:
    names = {name for cases in CASES.values() for name in cases}
    assert names >= CASTS.keys() | COPIES.keys() | GATHERED.keys()


@pytest.mark.parametrize(
    ("group", "name", "kind"),
    [
        pytest.param(group, name, kind, marks=marks(group))
        for group, cases in CASES.items()
        for name in cases
        for kind in ("casts", "copies", "asks")
    ],
)
def test_nothing_is_held_that_is_not_needed(counted, group: str, name: str, kind: str) -> None:
    count = counted(group, name)[kind]
    if kind == "casts":
        assert count <= CASTS.get(name, ALL)
    elif kind == "copies" and name in GATHERED:
        assert GATHERED[name] <= count <= GATHERED[name] + 2
    elif kind == "copies":
        # An asynchronous save copies small tensors into the same memory.
        assert count == pytest.approx(COPIES.get(name, 0), rel=0.02)
    else:
        assert count == [0, 0]  # in the last two steps
