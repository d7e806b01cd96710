"""Ranks of one replica must read the same batches, and different replicas different ones."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project_trainer.data.first_batches import fingerprint
from tests.project import run
from torch.nn.utils.rnn import pack_sequence

pytestmark = pytest.mark.timeout(600)


class Graph:
    def __init__(self, nodes: Any) -> None:
        self._store = {"nodes": nodes, "owner": self}

    def to(self, device: torch.device) -> "Graph":
        return self


X = torch.arange(6.0).reshape(2, 3)
LARGE = torch.zeros(300, 300)
OTHER = LARGE.clone()
OTHER[::7] = 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([X, "a"], [X + 1, "a"]),
        ([X, "a"], [X, "b"]),
        ({"x": X}, {"x": X.T}),
        ({"x": X}, {"x": X.double()}),
        (Graph(X), Graph(X + 1)),
        (pack_sequence([X[0], X[1, :2]]), pack_sequence([X[0], X[1, 1:]])),
        (X.numpy(), X.numpy() + 1),
        (np.array(["a"]), np.array(["b"])),
        (LARGE, OTHER),
        (X.bool(), ~X.bool()),
        (None, X),
    ],
)
def test_other_samples_have_another_fingerprint(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(one)
    assert fingerprint(one) != fingerprint(other)


def test_the_last_bit_of_a_number_does_not_count() -> None:
    assert fingerprint([X / 3]) == fingerprint([X / 3 * (1 + 1e-7)])


@pytest.mark.parametrize("value", [X.to_sparse(), X.to("meta"), X.bfloat16(), X * 1j, X[:0], {1}])
def test_fingerprint_of_any_value(value: Any) -> None:
    assert fingerprint([value]) == fingerprint([value])


def test_tells_if_replicas_read_the_same(tmp_path: Path) -> None:
    names = ["ddp:whole", "ddp:replica", "ddp:replica-sampler", "sequential:replica"]
    done = run(["-m", "replicas_subject", tmp_path, *names])
    assert done.returncode == 0, done.stderr
    parts = {
        name: done.stderr[done.stderr.index(f"{name} begins") : done.stderr.index(f"{name} ends")]
        for name in names
    }
    notes = {name: re.findall("^note: .*", part, re.MULTILINE) for name, part in parts.items()}
    (note,) = notes.pop("ddp:whole")
    assert note == (
        "note: ranks 0 and 1 have read the same first batch: the loader is read as it is, and each "
        "sample then counts 2 times; split the data by data_index and data_replicas of the module "
        "or the data module"
    )
    assert notes == {name: [] for name in names[1:]}
    seen = "ddp:whole rank 0 saw 120", "ddp:replica rank 0 saw 56", "sequential:replica rank 0 saw"
    assert all(line in done.stdout for line in seen), done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "sequential:rank",
        pytest.param("tensor_parallel:rank-sampler", marks=pytest.mark.slow),
        pytest.param("mesh:rank", marks=pytest.mark.slow),
    ],
)
def test_refuses_a_replica_whose_ranks_read_other_samples(tmp_path: Path, name: str) -> None:
    done = run(["-m", "replicas_subject", tmp_path, name])
    assert done.returncode != 0
    line = "ranks 0 and 1 are in one replica and have read different batches: all ranks of a "
    assert line in done.stderr
    assert "Traceback" not in done.stderr
