"""Ranks of one replica must read the same batches, and different replicas different ones."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer.data.hashing import check_first_batch, digest
from my_project_trainer.errors import UserError
from my_project_trainer.launch import collectives
from tests.project import run, succeed

pytestmark = pytest.mark.timeout(600)


X = torch.arange(6.0).reshape(2, 3)


def gathering(monkeypatch: pytest.MonkeyPatch, *others: tuple[int, Any]) -> list[int]:
    """Fake peers, each with a replica and a first batch; returns a list of this rank's calls."""
    calls: list[int] = []
    peers = [torch.tensor([number, int(digest(batch), 16) >> 1]) for number, batch in others]

    def gathered(local: torch.Tensor) -> list[torch.Tensor]:
        calls.append(int(local[0]))
        return [local, *peers]

    monkeypatch.setattr(collectives, "is_active", lambda: True)
    monkeypatch.setattr(collectives, "world_size", lambda: 1 + len(others))
    monkeypatch.setattr(collectives, "all_gather_equal", gathered)
    return calls


def test_a_rank_without_a_batch_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = gathering(monkeypatch, (0, X))
    with pytest.raises(UserError, match="ranks 0 and 1 are in one replica and have read different"):
        check_first_batch(iter([]), 0, replicas=1, tells=False)
    assert calls == [0]
    calls = gathering(monkeypatch, (0, None))
    assert list(check_first_batch(iter([]), 0, replicas=1, tells=False)) == []
    assert calls == [0]


def test_all_batches_are_read_after_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = gathering(monkeypatch, (0, [X]), (1, [X + 1]))
    assert [*check_first_batch(iter([[X], "b"]), 0, replicas=2, tells=False)] == [[X], "b"]
    assert calls == [0]


def test_tells_if_replicas_read_the_same(tmp_path: Path) -> None:
    names = ["ddp:whole", "ddp:replica", "ddp:replica-sampler", "sequential:replica"]
    done = succeed(["-m", "replicas_subject", tmp_path, *names])
    outputs = {
        name: done.stderr[done.stderr.index(f"{name} begins") : done.stderr.index(f"{name} ends")]
        for name in names
    }
    notes = {name: re.findall("^note: .*", text, re.MULTILINE) for name, text in outputs.items()}
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
    ["sequential:rank", pytest.param("tensor_parallel:rank-sampler", marks=pytest.mark.slow)],
)
def test_refuses_a_replica_whose_ranks_read_other_samples(tmp_path: Path, name: str) -> None:
    done = run(["-m", "replicas_subject", tmp_path, name])
    assert done.returncode != 0
    line = "ranks 0 and 1 are in one replica and have read different batches: all ranks of a "
    assert line in done.stderr
    assert "Traceback" not in done.stderr
