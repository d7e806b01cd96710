"""Batches are weighed by what is in them: the samples that are there, or what the module counts."""

from typing import Any

import pytest
import torch
from my_project_trainer.data import Share, feed_creation
from my_project_trainer.data.samples import Counter
from my_project_trainer.errors import UserError
from my_project_trainer.logging import BatchContext, Recorder
from my_project_trainer.loop import resuming
from my_project_trainer.strategies.base import read_loss
from torch import Tensor
from torch.utils.data import DataLoader, default_collate


def flat(*sizes: int) -> dict[str, Tensor]:
    """Clouds of so many points each in one tensor, and a value of each cloud."""
    return {"points": torch.ones(sum(sizes), 3), "value": torch.ones(len(sizes))}


@pytest.mark.parametrize(
    ("batches", "samples"),
    [
        ([flat(4, 2, 9), flat(1, 1, 8), flat(7)], [3, 3, 1]),
        ([flat(1, 1, 1), flat(4, 5, 1), flat(2, 2)], [3, 3, 2]),  # as many points as samples
        (
            [([torch.ones(k) for k in (2, 5, 3)], torch.ones(3)), ([torch.ones(5)], torch.ones(1))],
            [3, 1],
        ),
        ([{"x": torch.ones(7), "y": torch.ones(2)}], [2]),  # by the labels
        ([(torch.ones(7, 3), torch.ones(2)), (torch.ones(9, 3), torch.ones(1))], [2, 1]),
        ([(torch.ones(2, 4), torch.ones(2), torch.ones(0))], [2]),  # no boxes
        ([{"x": torch.ones(3, 5), "names": []}], [3]),
        ([torch.nn.utils.rnn.pack_sequence([torch.ones(4), torch.ones(2)])], [2]),
        ([(torch.nested.nested_tensor([torch.ones(4), torch.ones(2)]), torch.ones(2))], [2]),
    ],
)
def test_samples_of_ragged_batches(batches: list[Any], samples: list[int]) -> None:
    counter = Counter(Share(0, 1, 7))
    assert [counter.count(batch, 3).samples for batch in batches] == samples


def test_what_told_the_samples_of_a_flat_batch_tells_that_one_has_a_single_sample() -> None:
    counter = Counter(Share(0, 1, 7))  # tokens, offsets of texts in them, and labels
    batches = [tuple(map(torch.ones, sizes)) for sizes in [(9, 2, 2), (5, 1, 1), (12, 4, 4)]]
    assert [counter.count(batch, None).samples for batch in batches] == [2, 1, 4]


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        ({"a": torch.ones(7), "b": torch.ones(2)}, "7, 2"),
        ({"image": torch.ones(8, 3), "labels": torch.ones(40)}, "8, 40"),  # of boxes
        ((torch.ones(8, 3), torch.ones(3, 6)), "8, 3"),
        ((torch.ones(8, 3), torch.ones(40)), "8, 40"),
        ((torch.ones(8, 3), torch.ones(8), torch.ones(3)), "8, 3"),
        ((torch.ones(7, 3), torch.ones(7), torch.ones(2)), "7, 2"),  # points, clouds, labels
        ({"labeled": [torch.ones(4)] * 2, "other": [torch.ones(8)] * 2}, "2, 4, 8"),
        (([torch.ones(4)] * 2, [torch.ones(8)] * 2), "2, 4, 8"),
        (([torch.ones(4)] * 2, (torch.ones(8),) * 2), "2, 4, 8"),
    ],
)
def test_an_ambiguous_batch_is_one_line(batch: Any, lengths: str) -> None:
    with pytest.raises(UserError, match=rf"lengths \({lengths}\): override count_samples"):
        Counter(Share(0, 1, 7)).count(batch, None)


@pytest.mark.parametrize(
    "batch", [[torch.ones(3, 8, 8)] * 4, {"images": [torch.ones(1, 5, 5)] * 2}]
)
def test_images_in_a_list_are_not_counted_by_their_channels(batch: Any) -> None:
    with pytest.raises(UserError, match="may be samples or fields: override count_samples"):
        Counter(Share(0, 1, 7)).count(batch, None)
    assert Counter(Share(0, 1, 7)).count([torch.ones(3, 8, 8)] * 4, 4).samples == 4
    assert Counter(Share(0, 1, 7)).count(["a", "b"], None).samples == 2


def good(samples: list[float]) -> Tensor:
    """Leave damaged samples, 0 and below, out."""
    kept: Tensor = default_collate([sample for sample in samples if sample > 0])
    return kept


@pytest.mark.parametrize("in_global_order", [True, False])
@pytest.mark.parametrize("weight", [None, lambda batch: batch.sum()])
def test_each_step_is_the_mean_over_what_it_contains(in_global_order: bool, weight: Any) -> None:
    data = [1.0, 2.0, 0.0, *map(float, range(4, 12))]
    loader: DataLoader[Any] = DataLoader(data, 3, collate_fn=good)  # type: ignore[arg-type]
    how = {"accumulate": 3, "global_batch_size": None, "in_global_order": in_global_order}
    feed = feed_creation.feed_training(loader, Share(0, 1, 3, count_weight=weight), **how)
    steps: list[list[Any]] = [[]]
    for batch in feed.epoch(0, 0):
        assert batch.samples == len(batch.data)
        counted = len(batch.data) if weight is None else batch.data.sum()
        assert batch.counted == pytest.approx(counted)
        steps[-1].append(batch)
        if batch.ends_step and not batch.ends_epoch:
            steps.append([])
    for step in steps:
        total = sum(micro.counted for micro in step)
        assert [micro.weight for micro in step] == pytest.approx([e.counted / total for e in step])
    assert sum(micro.samples for step in steps for micro in step) == 10


def test_a_weight_that_a_step_returns_is_not_ignored() -> None:
    with pytest.raises(UserError, match="override count_weight"):
        read_loss({"loss": torch.tensor(1.0), "weight": 3})


def test_sums_of_ranks_are_merged_for_another_layout() -> None:
    def recorder() -> Recorder:
        return Recorder(lambda tensor, how: tensor, torch.device("cpu"))

    states = []
    for samples, value in ((3, 2.0), (1, 6.0)):
        of_rank = recorder()
        of_rank.enter(BatchContext(samples=samples, counted=samples))
        of_rank.log("loss", torch.tensor(value))
        of_rank.log("most", torch.tensor(value), reduce_fx="max")
        of_rank.log("own", torch.tensor(value), sync_dist=False)
        states.append(of_rank.state())
    merged = recorder()
    merged.load_state(resuming._merged(states))
    assert merged.take_epoch() == {"loss_epoch": 3.0, "most_epoch": 6.0}
