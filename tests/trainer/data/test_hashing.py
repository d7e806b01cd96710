"""One hash of all values, in particular of batches: what changes it, and what it needs."""

from typing import Any

import numpy as np
import pytest
import torch
from my_project_trainer.data import hashing
from my_project_trainer.data.hashing import digest
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from live_storages import Live


class Graph:
    def __init__(self, nodes: Any) -> None:
        self._store = {"nodes": nodes, "owner": self}

    def to(self, device: torch.device) -> "Graph":
        return self


X = torch.arange(6.0).reshape(2, 3)
LARGE = torch.zeros(300, 300)
LAST = LARGE.clone()
LAST[-1, -1] = 1e-30


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
        (np.array(["a", None]), np.array(["b", None])),
        (LARGE, LAST),
        (LARGE.numpy(), LAST.numpy()),
        (LARGE.to_sparse_csr(), LAST.to_sparse_csr()),
        (X.bool(), ~X.bool()),
        (None, X),
    ],
)
def test_other_values_have_another_hash(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    "value",
    [
        *(X.to_sparse(), X.to("meta"), X.bfloat16(), X * 1j, X[:0], {1}, Graph, "\ud800"),
        torch.nested.nested_tensor([X[0], X[1, :2]], layout=torch.jagged),
        nn.Parameter(X),
    ],
)
def test_any_value_has_a_hash(value: Any) -> None:
    assert digest([value]) == digest([value]) != digest([])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_values_have_hashes() -> None:
    one, other = (torch.quantize_per_tensor(X + offset, 0.1, 0, torch.qint8) for offset in (0, 1))
    assert digest(one) == digest(one) != digest(other)


def test_every_bit_and_place_counts() -> None:
    before = torch.get_rng_state()
    piece = hashing._WORDS
    tensor = torch.linspace(-1, 1, piece * 3 + 5)
    digests = {digest(tensor)}
    for place in (0, 1, piece, -1):
        for bit in (0, 15, 31):
            changed = tensor.clone()
            changed.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            digests.add(digest(changed))
    # Both signs, which a sum that is not of 64 bits would not see.
    changed = tensor.clone()
    changed[:2] *= -1
    swapped = tensor.clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    # Two pieces in another order, and two values at the same place in them.
    pieces = torch.cat([tensor[piece : 2 * piece], tensor[:piece], tensor[2 * piece :]])
    across = tensor.clone()
    across[[7, piece + 7]] = across[[piece + 7, 7]]
    others = (changed, swapped, pieces, across, tensor[:-1], tensor.view(1, -1))
    digests |= {digest(other) for other in others}
    digests |= {digest([tensor, None]), digest([tensor[:5], tensor[5:]])}
    digests.add(digest(tensor.view(torch.int32)))
    assert len(digests) == 1 + 12 + 6 + 2 + 1
    assert torch.equal(torch.get_rng_state(), before)


def test_an_accelerator_that_sums_more_pieces_at_once_finds_the_same(monkeypatch) -> None:
    words = torch.arange(hashing._WORDS * 40 + 5, dtype=torch.int32)
    numbers = hashing._numbers(words.device)
    alone = hashing._sums(words, numbers)
    assert alone.shape == (41,)
    meta = type("Words", (), {"device": torch.device("cuda"), "split": words.split})
    assert torch.equal(hashing._sums(meta(), numbers), alone)
    assert alone[0] == (words[: hashing._WORDS] * numbers).sum()


def test_other_layouts_have_hashes() -> None:
    image = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    last = image.to(memory_format=torch.channels_last)
    assert digest(last) == digest(last.clone(memory_format=torch.preserve_format))
    assert digest(image[:, 1]) == digest(image[:, 1])
    rows = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True)
    assert digest(rows) == digest(rows.clone()) != digest(2 * rows)


def test_hashes_need_at_most_one_mebibyte() -> None:
    """Of a tensor of 12 MiB, and with the numbers, which are made for the first one."""
    tensor = torch.ones(3 * 2**20)
    hashing._numbers.cache_clear()
    with Live() as live:
        live.begin()
        digest([tensor, tensor[:5]])
    assert live.most >= 3 * hashing._WORDS * 4
    assert live.most + hashing._numbers(tensor.device).nbytes <= 2**20
