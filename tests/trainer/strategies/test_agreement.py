"""What ranks tell each other of batches that their loaders give: several at a time, exactly."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from my_project_trainer import errors
from my_project_trainer.data import Share, replay
from torch import Tensor

SHARE = Share(replica=0, replicas=2, seed=3)


class Peer:
    """Another rank, whose batches have so many samples; counts what the ranks exchange."""

    def __init__(self, samples: list[int]) -> None:
        self._ends = iter([*zip(samples, [0] * (len(samples) - 1) + [1], strict=True)])
        self.exchanged: list[int] = []

    def all_reduce(self, rows: Tensor) -> Tensor:
        """Add the peer's rows; it is rank 1."""
        self.exchanged.append(len(rows))
        for row in rows:
            row[1] = torch.tensor([*next(self._ends, (0, 1)), -1])
        return rows


class Stream:
    """Batches of so many samples each, one of which may be broken; counts what is read."""

    def __init__(self, samples: list[int], broken: int = -1) -> None:
        self.samples, self.broken, self.read = samples, broken, 0

    def __iter__(self) -> Iterator[Tensor]:
        for number, samples in enumerate(self.samples):
            if number == self.broken:
                raise ArithmeticError("broken")
            self.read += 1
            yield torch.full((samples,), float(number))


def epoch(monkeypatch, peer, stream, uneven="refuse", start=0) -> Iterator[Any]:
    """An epoch of rank 0 of two."""
    monkeypatch.setattr(replay.collectives, "world_size", lambda: 2)
    monkeypatch.setattr(replay.collectives, "all_reduce", peer.all_reduce)
    return replay.ReplayFeed(stream, SHARE, 2, uneven, None).epoch(0, start)


@pytest.mark.parametrize("start", [0, 5])
def test_batches_are_exchanged_by_the_eight_and_weighted_each(monkeypatch, start):
    sizes, others = [4] * 38 + [2, 1], [4, 3] * 20
    peer = Peer(others)
    batches = list(epoch(monkeypatch, peer, Stream(sizes), start=start))
    assert peer.exchanged == [2, 4, 8, 8, 8, 8, 8]  # and not twenty times two
    expected = [(number, sizes[number], number) for number in range(start, 40)]
    assert [(batch.number, batch.samples, float(batch.data[0])) for batch in batches] == expected
    sums = [sum(sizes[at : at + 2] + others[at : at + 2]) for at in range(0, 40, 2)]
    weights = [sizes[number] * 2 / sums[number // 2] for number in range(start, 40)]
    assert [batch.weight for batch in batches] == weights
    assert [batch.number for batch in batches if batch.ends_step] == list(range(start | 1, 40, 2))
    assert [batch.number for batch in batches if batch.ends_epoch] == [39]


@pytest.mark.parametrize(("ours", "others"), [(20, 25), (25, 20), (3, 25), (1, 2)])
def test_joined_loaders_count_each_sample_once(monkeypatch, ours, others):
    batches = list(epoch(monkeypatch, Peer([2] * others), Stream([2] * ours), "join"))
    last = max(ours, others)
    assert [batch.number for batch in batches] == list(range(last))
    assert [batch.samples for batch in batches] == [2] * ours + [0] * (last - ours)
    counts = [[2 * (number < count) for count in (ours, others)] for number in range(last + 1)]
    sums = [sum(counts[at] + counts[at + 1]) for at in range(0, last, 2)]
    weights = [2 * counts[number][0] / sums[number // 2] for number in range(last)]
    assert [batch.weight for batch in batches] == weights
    assert float(batches[-1].data[0]) == ours - 1
    assert [batch.ends_epoch for batch in batches] == [False] * (last - 1) + [True]


@pytest.mark.parametrize(("ours", "others", "said"), [(20, 25, 20), (25, 20, 20), (1, 2, 1)])
def test_uneven_loaders_are_refused_at_the_last_batch_of_the_shorter(
    monkeypatch, ours, others, said
):
    batches = epoch(monkeypatch, Peer([2] * others), Stream([2] * ours))
    trained: list[int] = []
    with pytest.raises(errors.UserError, match="different numbers of batches") as raised:
        trained.extend(batch.number for batch in batches)
    assert trained == list(range(said - 1))
    counts = [str(said) if count == said else f"more than {said}" for count in (ours, others)]
    assert f": rank 0 has {counts[0]}, rank 1 has {counts[1]}; " in str(raised.value)


def test_a_batch_that_cannot_be_read_fails_in_its_turn(monkeypatch):
    batches = epoch(monkeypatch, Peer([2] * 40), Stream([2] * 40, broken=20))
    trained: list[int] = []
    with pytest.raises(ArithmeticError, match="broken"):
        trained.extend(batch.number for batch in batches)
    assert trained == list(range(19))  # not the one before it, which could be the last


def test_a_run_that_ends_has_read_nine_batches_ahead_at_most(monkeypatch):
    stream, most = Stream([2] * 40), 0
    for batch in epoch(monkeypatch, Peer([2] * 40), stream):
        most = max(most, stream.read - batch.number - 1)
    assert most == 8  # and one more to copy it to a GPU
