"""The epoch and the worker reach the user's own objects: data, samplers, ``collate_fn``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

from fitting import Descends, quiet


class Told:
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Data(Told, Dataset[Tensor]):
    """Eight samples with their epoch; a worker opens a file."""

    opened = 0.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, self.epoch, self.opened])


class Stream(Told, IterableDataset[Tensor]):
    """The same as a stream; each sample has a random number of the worker."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, 8, workers):
            yield torch.tensor([index, self.epoch, float(torch.rand(()))])


class Collate(Told):
    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack([torch.cat([sample, torch.tensor([self.epoch])]) for sample in samples])


class Order(Told, Sampler[int]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % 8 for index in range(8)])


class Model(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows: list[list[list[float]]] = []
        self.validated: list[list[list[float]]] = []

    def on_train_epoch_start(self) -> None:
        self.rows.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows[-1] += batch.tolist()
        return self.weight * batch.float().mean()

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated[-1] += batch.tolist()


def fit(tmp_path: Path, *loaders: Any, **options: Any) -> Model:
    made = quiet(default_root_dir=tmp_path, max_epochs=3, sanity_check=0, **options)
    made.fit(model := Model(), *loaders)
    return model


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize("workers", [{}, PERSISTENT])
def test_a_dataset_in_a_subset_and_collate_fn_are_told(tmp_path: Path, workers: Any) -> None:
    loader = DataLoader(Subset(Data(), range(8)), 4, collate_fn=Collate(), **workers)
    for epoch, rows in enumerate(fit(tmp_path, loader).rows):
        assert sorted(rows) == [[index, epoch, 0, epoch] for index in range(8)]


def test_workers_of_a_stream_are_told_and_draw_as_new_ones(tmp_path: Path, capsys: Any) -> None:
    streams = [DataLoader(Stream(), 4, **options) for options in (PERSISTENT, {"num_workers": 2})]
    (kept, said), (new, silent) = (
        (fit(tmp_path, stream, stream, val_every_n_steps=1), capsys.readouterr().err)
        for stream in streams
    )
    assert kept.rows == new.rows
    assert [{row[1] for row in rows} for rows in kept.rows] == [{0}, {1}, {2}]
    assert all(rows == kept.validated[0] for rows in kept.validated + new.validated)
    assert "persistent_workers" in said
    assert "persistent_workers" not in silent


def test_the_sampler_in_a_batch_sampler_is_told(tmp_path: Path) -> None:
    loader = DataLoader(Data(), batch_sampler=BatchSampler(Order(), 4, drop_last=False))
    rows = fit(tmp_path, loader).rows
    assert [[row[0] for row in batches[:2]] for batches in rows] == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.slow
def test_validation_of_the_same_data_leaves_training_its_epoch(tmp_path: Path) -> None:
    data = Data()
    loaders = [DataLoader(Subset(data, range(first, first + 4)), 1) for first in (0, 4)]
    model = fit(tmp_path, *loaders, val_every_n_steps=1)
    assert [{row[1] for row in rows} for rows in model.rows] == [{0}, {1}, {2}]
    assert {row[1] for rows in model.validated for row in rows} == {0}


def _open(worker: int) -> None:
    info: Any = get_worker_info()
    assert type(info.dataset) is Data
    info.dataset.opened = 5.0 + worker


@pytest.mark.parametrize("options", [{}, PERSISTENT])
def test_a_worker_has_the_user_s_dataset(tmp_path: Path, options: Any) -> None:
    loader = DataLoader(Data(), 4, worker_init_fn=_open, **{"num_workers": 2, **options})
    model = fit(tmp_path, loader, loader)
    rows = [row for epoch in model.rows + model.validated for row in epoch]
    assert {row[2] for row in rows} == {5.0, 6.0}
