"""Loaders that say their position: a resume within an epoch reads no batch again."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project_trainer import CheckpointError
from my_project_trainer.data import Feed, Share, replay
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import fitting
from fitting import saved

SAMPLES, SIZE = 24, 4


class Noisy(IterableDataset[Tensor]):
    """Samples with noise of three libraries, from its position on; counts its reads."""

    def __init__(self) -> None:
        self.position, self.reads = 0, 0
        self.also: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < SAMPLES:
            self.reads += 1
            noise = [float(torch.rand(1)), float(np.random.rand()), random.random()]
            self.position += 1
            yield torch.tensor([float(self.position), *noise])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "also": self.also}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


LOADERS: dict[str, Callable[[Noisy], DataLoader[Any]]] = {
    "dataset": lambda dataset: DataLoader(dataset, SIZE),
    "loader": lambda dataset: StatefulDataLoader(dataset, SIZE),
    "loader with workers": lambda dataset: StatefulDataLoader(dataset, SIZE, num_workers=2),
}
PLAIN = LOADERS["dataset"]


def read(feed: Feed, start: int = 0) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    batches, states = [], []
    for batch in feed.epoch(1, start):
        batches.append(batch.data)
        states.append(feed.state(batch.number + 1, ends_epoch=False))
    return batches, states


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_goes_on_from_any_batch_without_reading_earlier_ones(monkeypatch, kind, most, ranks):
    """With another rank, which reads the same, batches are read further ahead."""
    monkeypatch.setattr(replay.collectives, "world_size", lambda: ranks)
    monkeypatch.setattr(replay.collectives, "all_reduce", lambda rows: rows[:, :1].repeat(1, 2, 1))

    def feed(dataset: Noisy) -> Feed:
        share = Share(replica=0, replicas=1, seed=3)
        return replay.ReplayFeed(LOADERS[kind](dataset), share, 1, "refuse", most)

    has_workers = "workers" in kind  # each reads the whole stream, with its own random numbers
    batches, states = read(feed(Noisy()))
    assert len(batches) == (SAMPLES * (1 + has_workers) // SIZE if most is None else 5)
    for start in range(1, len(batches), 3 if has_workers else 1):
        dataset = Noisy()
        resumed = feed(dataset)
        assert len(resumed.load_state(states[start - 1], start)) == has_workers
        rest, later = read(resumed, start)
        columns = slice(1 if has_workers else None)
        for one, other in zip(rest, batches[start:], strict=True):
            assert torch.equal(one[:, columns], other[:, columns])
        if kind == "dataset" and most is None:
            assert dataset.reads == SAMPLES - start * SIZE
        expected = [state["tree"].tolist() for state in states[start:]]
        assert [state["tree"].tolist() for state in later] == expected
        if most is None:  # the next epoch is read from its beginning
            assert len(read(resumed)[0]) == len(batches)


class Told(Sampler[int]):
    """Says a state that a loader does not save."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = state_dict


class Kept(TensorDataset):
    """A map-style dataset, whose state is no position."""

    state_dict = load_state_dict = Told.state_dict


@pytest.mark.parametrize("told", [True, False])
def test_the_state_of_a_sampler_is_not_saved_and_said_so(told: bool) -> None:
    dataset = Kept(torch.arange(float(SAMPLES)))
    sampler = Told() if told else SubsetRandomSampler(range(SAMPLES))
    for loader in (
        DataLoader(dataset, SIZE, sampler=sampler),
        DataLoader(dataset, batch_sampler=BatchSampler(sampler, SIZE, False)),
    ):
        feed = replay.ReplayFeed(loader, Share(replica=0, replicas=1, seed=3), 1, "refuse", None)
        expected = ["the state_dict of Told is not saved"] * told
        assert [remark.split(":")[0] for remark in feed.remarks] == expected
        batches, states = read(feed)
        assert states[2] == {}
        rest, _ = read(feed, 3)
        for one, other in zip(rest, batches[3:], strict=True):
            assert torch.equal(one[0], other[0])


class Net(fitting.Descends, lr=0.01):
    def __init__(self, dataset: Noisy, loader: Callable[[Noisy], DataLoader[Any]] = PLAIN) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.dataset, self.loader = dataset, loader

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.dataset)


def fit(folder: Path, module: Net, **options: Any) -> dict[str, Tensor]:
    saves = {"checkpoint_every_n_steps": 1, "max_epochs": 2, "run_name": None}
    return saved(fitting.fit(module, folder, **{**saves, **options}).run_directory)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("limit", "stop", "rest"),
    [
        (1.0, 9, SAMPLES - 3 * SIZE),  # in the second epoch, after three of six batches
        (1.0, 6, SAMPLES),  # between the epochs
        (4, 4, 2 * SIZE),  # the second epoch continues the stream: two batches remain
    ],
)
def test_a_fit_resumes_exactly_and_reads_only_the_rest(tmp_path, limit, stop, rest):
    limited = {"limit_train_batches": limit}
    uninterrupted = fit(tmp_path, Net(Noisy()), run_name="whole", **limited)
    fit(tmp_path, Net(Noisy()), run_name="run", max_steps=stop, **limited)
    dataset = Noisy()
    resumed = fit(tmp_path, Net(dataset), run_name="run", resume="auto", **limited)
    assert dataset.reads == rest
    assert uninterrupted.keys() == resumed.keys()
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


@pytest.mark.usefixtures("apart")
def test_what_cannot_be_used_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Net(Noisy()), run_name="run", max_steps=3)
    capfd.readouterr()
    fit(tmp_path, Net(Noisy()), run_name="run", resume="auto", accumulate_grad_batches=2)
    assert "the first 2 batches of the epoch are read again and skipped" in capfd.readouterr().err


@pytest.mark.usefixtures("apart")
def test_a_dataset_that_workers_copy_is_told(tmp_path, capfd):
    fit(tmp_path, Net(Noisy(), lambda dataset: DataLoader(dataset, SIZE, num_workers=1)))
    assert "use torchdata's StatefulDataLoader" in capfd.readouterr().err


@pytest.mark.usefixtures("apart")
def test_a_state_that_cannot_be_saved_is_refused_in_a_line(tmp_path: Path) -> None:
    dataset = Noisy()
    dataset.also = object()
    with pytest.raises(CheckpointError, match=r"^loader/also is a object; a checkpoint supports"):
        fit(tmp_path, Net(dataset))
