"""Batches are counted and split by samples."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project_trainer.data.samples import Splitter, batch_length, part_sizes
from my_project_trainer.errors import UserError
from test_devices import Images
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from fitting import Descends, quiet

Pair = namedtuple("Pair", "x y")


def images(count: int) -> list[torch.Tensor]:
    """Images of three channels: the first dimension is not that of samples."""
    return [torch.full((3, 2, 2), float(number)) for number in range(count)]


def targets(count: int) -> list[dict[str, torch.Tensor]]:
    """What objects each image has: another number in each."""
    return [{"boxes": torch.full((number + 1, 4), float(number))} for number in range(count)]


class Graphs:
    """A batch of graphs, which has no first dimension of samples."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.nodes = torch.arange(float(sum(sizes)))

    def to(self, device: torch.device) -> "Graphs":
        return self


class Splittable(Graphs):
    def __len__(self) -> int:
        return len(self.sizes)

    def split(self, sizes: list[int]) -> list["Splittable"]:
        ends = np.cumsum(sizes)
        return [
            Splittable(self.sizes[end - size : end]) for size, end in zip(sizes, ends, strict=True)
        ]


def values(batch: Any) -> Any:
    """A batch with its tensors as lists of the first value of each entry."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch.reshape(-1).tolist()[:1] if batch.ndim > 1 else batch.tolist()
    if isinstance(batch, dict):
        return {key: values(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(values(field) for field in batch) if type(batch) is not Pair else batch
    return batch.sizes if isinstance(batch, Graphs) else batch


X = torch.arange(5.0)
CASES: dict[str, tuple[Any, int | None, list[Any]]] = {
    "fields": ([X, X + 1], 5, [[[0, 1, 2], [1, 2, 3]], [[3, 4], [4, 5]]]),
    "of any number": ([X, X + 1], None, [[[0, 1, 2], [1, 2, 3]], [[3, 4], [4, 5]]]),
    "as many fields as samples": ([X[:2], X[2:4]], 2, [[[0], [2]], [[1], [3]]]),
    "a pair of as many": ([[X[:2], X[2:4]], X[:2]], 2, [[[[0], [2]], [0]], [[[1], [3]], [1]]]),
    "images": (images(5), 5, [[[0], [1], [2]], [[3], [4]]]),
    "images and labels": (
        (images(5), X),
        None,
        [([[0], [1], [2]], [0, 1, 2]), ([[3], [4]], [3, 4])],
    ),
    "as many as channels": (
        (tuple(images(3)), tuple(targets(3))),
        3,
        [(([0], [1]), ({"boxes": [0]}, {"boxes": [1]})), (([2],), ({"boxes": [2]},))],
    ),
    "two images": (
        (images(2), targets(2)),
        2,
        [([[0]], [{"boxes": [0]}]), ([[1]], [{"boxes": [1]}])],
    ),
    "lists without tensors": (
        {"text": ["a", "b", "c"]},
        None,
        [{"text": ["a", "b"]}, {"text": ["c"]}],
    ),
    "texts": (["a", "b", "c"], 3, [["a", "b"], ["c"]]),
    "of the whole batch": (
        {"x": X, "scale": torch.tensor(2.0), "name": "n", "sizes": [7, 8], "none": None},
        5,
        [
            {"x": [0, 1, 2], "scale": 2.0, "name": "n", "sizes": [7, 8], "none": None},
            {"x": [3, 4], "scale": 2.0, "name": "n", "sizes": [7, 8], "none": None},
        ],
    ),
    "arrays": ({"x": X.numpy()}, None, [{"x": [0, 1, 2]}, {"x": [3, 4]}]),
    "its own way": ([Splittable([4, 2, 3])], 3, [[[4, 2]], [[3]]]),
    "fewer than were asked for": ([X, X], 8, [[[0, 1, 2]] * 2, [[3, 4]] * 2]),
}


@pytest.mark.parametrize("name", CASES)
def test_splits_by_samples(name: str) -> None:
    batch, expected, parts = CASES[name]
    number = batch_length(batch, expected)
    assert [values(word) for word in Splitter().split(batch, part_sizes(number, 2))] == parts


def test_splits_a_dataclass() -> None:
    batch = Images(X, ["a", "b"])
    batch.sizes["width"] = X + 1
    pieces = Splitter().split(batch, [3, 2])
    assert [piece.pixels.tolist() for piece in pieces] == [[0, 1, 2], [3, 4]]
    assert [piece.sizes["width"].tolist() for piece in pieces] == [[1, 2, 3], [4, 5]]
    assert [piece.names for piece in pieces] == [["a", "b"]] * 2


def test_a_list_of_images_stays_one_when_it_is_as_long_as_its_channels() -> None:
    splitter = Splitter()
    for number in (5, 3):
        batches = splitter.split(images(number), part_sizes(number, 2))
        assert [len(batch) for batch in batches] == part_sizes(number, 2)


def test_splits_a_named_tuple() -> None:
    pairs = Splitter().split(Pair(X, images(5)), [3, 2])
    assert [type(pair) for pair in pairs] == [Pair, Pair]
    assert [(values(pair.x), values(pair.y)) for pair in pairs] == [
        ([0, 1, 2], [[0], [1], [2]]),
        ([3, 4], [[3], [4]]),
    ]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ([torch.ones(8, 3), torch.ones(8), torch.ones(4)], r"shapes \(8, 3\) and \(4,\)"),
        # As many fields as samples.
        ([torch.ones(3, 2), torch.ones(3), torch.ones(4)], r"shapes \(3, 2\) and \(4,\)"),
        ({"x": torch.ones(8, 3), "weights": torch.ones(4)}, r"shapes \(8, 3\) and \(4,\)"),
        ([torch.ones(8), Graphs([2] * 8)], r"Graphs cannot be: give it __len__ and split\(sizes\)"),
        (Graphs([2] * 8), r"Graphs cannot be: give it __len__ and split\(sizes\)"),
        (pack_sequence([torch.ones(3), torch.ones(2)]), "PackedSequence cannot be"),
    ],
)
def test_refuses_what_has_no_samples(batch: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as raised:
        Splitter().split(batch, part_sizes(batch_length(batch, 8), 2))
    assert len(raised.value.problems) == 1


def test_one_part_is_the_batch() -> None:
    batch = Graphs([2, 2])
    assert Splitter().split(batch, [2]) == [batch]


class Detector(Descends):
    """Trains on a list of images, of which each has another size."""

    def __init__(self) -> None:
        super().__init__()
        self.sequential_module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        means = torch.stack([image.mean((1, 2)) for image in batch])
        return self.sequential_module(means).square().mean()

    def train_dataloader(self) -> Any:
        torch.manual_seed(0)
        data = [torch.randn(3, 1 + number % 4, 2) for number in range(11)]
        return DataLoader(data, batch_size=8, collate_fn=list)  # type: ignore[arg-type]


def trained(make: Any, strategy: str, devices: int, folder: Path) -> torch.Tensor:
    """The parameters of a module after two epochs."""
    torch.manual_seed(1)
    module = make()
    quiet(strategy=strategy, devices=devices, max_epochs=2, default_root_dir=folder).fit(module)
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Penalized(Descends):
    """Its loss has a penalty on all parameters, of which two layers share one."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.network[2].weight = self.network[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return self.network(batch).square().mean() + penalty

    def train_dataloader(self) -> Any:
        return DataLoader(torch.linspace(-1, 1, 32).view(8, 4), batch_size=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "strategies"),
    [(Detector, {"dp": 3, "sequential": 1}), (Penalized, {"dp": 2})],
    ids=["a list of images", "a parameter of two layers"],
)
def test_strategies_that_split_batches_equal_one_device(make, strategies, tmp_path):
    alone = trained(make, "single_device", 1, tmp_path)
    for strategy, devices in strategies.items():
        assert float((trained(make, strategy, devices, tmp_path) - alone).abs().max()) < 1e-6
