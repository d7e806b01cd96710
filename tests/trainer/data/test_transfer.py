"""Batches are pinned and copied one ahead on GPUs: here with a stream that writes down its use."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from my_project_trainer.data import feed as feeds
from my_project_trainer.data import feed_creation, moving, replay
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fitting import Descends, quiet

META = torch.device("meta")  # a second device that every machine has
CPU = torch.device("cpu")
SHARE = feeds.Share(replica=0, replicas=1, seed=3)


class Stream:
    """Writes down in which order batches are copied and handed over."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.is_copying = False
        self.handed_over: list[Tensor] = []

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self.log.append("copy")
        self.is_copying = True
        yield
        self.is_copying = False

    def synchronize(self, tensors: list[Tensor]) -> None:
        self.log.append("hand over")
        self.handed_over += tensors


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams that have been asked for, on whatever device."""
    made: list[Stream] = []

    def pinned(tensor: Tensor) -> Tensor:
        assert sum(stream.is_copying for stream in made) == 1
        return tensor.clone()

    def copy_stream(device: torch.device) -> Stream:
        made.append(Stream([]))
        return made[-1]

    monkeypatch.setattr(moving, "copy_stream", copy_stream)
    monkeypatch.setattr(moving, "pinned", pinned)
    return made


class Squares(Dataset[Tensor]):
    """Six numbers; what is read of them is noted, and one of them may be broken."""

    def __init__(self, log: list[Any], broken: int = -1) -> None:
        self.log, self.broken = log, broken

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if index == self.broken:
            raise IndexError("broken")
        self.log.append("read")
        return torch.tensor(float(index))


def ordered(data: Dataset[Tensor], batch_size: int = 2) -> Any:
    return feed_creation.feed_evaluation(DataLoader(data, batch_size), SHARE, in_global_order=True)


def read(feed: Any, device: torch.device = CPU, dtype: torch.dtype | None = None) -> list[Any]:
    return list(moving.ahead(feed.epoch(0, 0), [device], dtype))


def until_error(batches: Iterator[Any]) -> list[int]:
    """Numbers of the batches that come before the broken one."""
    seen = []
    try:
        for batch in batches:
            seen.append(batch.number)
    except (IndexError, ValueError) as error:
        assert str(error) == "broken"  # noqa: PT017
        return seen
    raise AssertionError("nothing was broken")


def test_each_batch_is_copied_before_the_one_ahead_of_it_is_computed(streams):
    log: list[Any] = []
    for batch in moving.ahead(ordered(Squares(log)).epoch(0, 0), [CPU], None):
        streams[0].log = log  # from now on all in one
        log.append(batch.number)
    reads = ["read", "read"]
    # The first two are read before the first is computed; a copy is not waited for by the batch
    # before it: that one is handed over first.
    assert log == [*reads, *reads, 0, "hand over", *reads, "copy", 1, "hand over", 2]


def test_batches_are_those_of_the_feed_and_all_handed_over(streams):
    feed = ordered(Squares([]), 4)
    expected, batches = list(feed.epoch(0, 0)), read(feed)
    assert len(batches) == 2
    assert [batch.data.tolist() for batch in batches] == [batch.data.tolist() for batch in expected]
    assert [batch[1:] for batch in batches] == [batch[1:] for batch in expected]
    assert [id(batch.data) for batch in batches] == list(map(id, streams[0].handed_over))
    assert [batch.number for batch in moving.ahead(feed.epoch(0, 1), [CPU], None)] == [1]


def test_tensors_are_moved_and_cast_wherever_they_are_and_nothing_else(streams):
    class Graph:
        def to(self, device: torch.device) -> None:
            raise AssertionError("left for the step's own stream")

    class Own(Tensor):
        pass

    packed = pack_sequence([torch.ones(3), torch.ones(2)], enforce_sorted=False)
    left = [Graph(), torch.ones(2).to_sparse(), torch.ones(2).as_subclass(Own), "text", 3, None]
    moved = defaultdict(list, half=torch.ones(2), whole=[(torch.arange(2),)], packed=packed)
    feed = replay.ReplayFeed([{"left": left, "moved": moved}], SHARE, 1, "refuse", None)
    (batch,) = read(feed, META, torch.half)
    assert all(one is other for one, other in zip(batch.data["left"], left, strict=True))
    container = batch.data["moved"]
    assert type(container) is defaultdict
    assert (container["half"].device, container["half"].dtype) == (META, torch.half)
    assert (container["whole"][0][0].device, container["whole"][0][0].dtype) == (META, torch.int64)
    sequence = container["packed"]
    assert type(sequence) is PackedSequence
    assert (sequence.data.device, sequence.data.dtype) == (META, torch.half)
    assert sequence.batch_sizes is packed.batch_sizes  # where torch wants it
    assert (sequence.sorted_indices.device, sequence.sorted_indices.dtype) == (META, torch.int64)
    handed_over = set(map(id, streams[0].handed_over))
    assert len(handed_over) == 5
    assert {id(container["half"]), id(sequence.data), id(sequence.unsorted_indices)} < handed_over


class Fields(dict[str, Tensor]):
    def __init__(self, x: Tensor, kind: str) -> None:
        super().__init__(x=x)
        self.kind = kind


class Pair(tuple[Tensor, Tensor]):
    def __new__(cls, x: Tensor, kind: str) -> "Pair":
        made = super().__new__(cls, (x, x))
        vars(made)["kind"] = kind
        return made


class Items(list[Tensor]):
    def __init__(self, x: Tensor, kind: str) -> None:
        super().__init__([x])
        self.kind = kind


@pytest.mark.parametrize("kind", [Fields, Pair, Items])
def test_a_batch_of_a_class_with_arguments_of_its_own_keeps_its_attributes(kind: Any) -> None:
    batch = kind(torch.ones(2), "images")
    moved = moving.move(batch, CPU, torch.float64)
    assert (type(moved), vars(moved)) == (kind, {"kind": "images"})
    assert {tensor.dtype for tensor in moving.leaves(moved)} == {torch.float64}
    assert {tensor.dtype for tensor in moving.leaves(batch)} == {torch.float32}


def test_containers_that_cannot_be_changed_are_made_by_their_class() -> None:
    batch = MappingProxyType({"best": torch.ones(2, 2).max(dim=0)})
    moved = moving.move(batch, CPU, torch.float64)["best"]
    assert isinstance(moved, torch.return_types.max)
    assert moved.values.dtype == torch.float64


def test_a_batch_that_cannot_be_read_fails_in_its_turn(streams):
    batches = moving.ahead(ordered(Squares([], broken=4)).epoch(0, 0), [CPU], None)
    assert until_error(batches) == [0, 1]


def test_a_stream_that_breaks_fails_in_its_turn(streams):
    class Fails(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from torch.arange(3.0)
            raise ValueError("broken")

    feed = feed_creation.feed_training(
        DataLoader(Fails()), SHARE, accumulate=1, global_batch_size=None, in_global_order=True
    )
    assert until_error(feed.epoch(0, 0)) == [0, 1]
    assert until_error(moving.ahead(feed.epoch(0, 0), [CPU], None)) == [0, 1]


def test_on_cpus_there_is_none_of_it():
    epoch: Iterator[Any] = iter(())
    assert moving.ahead(epoch, [CPU], torch.half) is epoch
    assert moving.ahead(epoch, [CPU, CPU], None) is epoch


def test_for_several_gpus_batches_are_pinned_and_stay(monkeypatch):
    monkeypatch.setattr(moving, "pinned", lambda tensor: tensor + 100)
    monkeypatch.setattr(moving, "copy_stream", lambda device: object())
    gpus = [torch.device("cuda", 1), torch.device("cuda", 0)]
    batches = list(moving.ahead(ordered(Squares([]), 4).epoch(0, 0), gpus, None))
    assert [batch.data.tolist() for batch in batches] == [[100, 101, 102, 103], [104, 105]]


class Noisy(Descends):
    """Learns from samples with noise; dropout beside it must not be touched by reading ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        loss = self.drop(self.linear(x)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.linear(batch[0]).square().mean())


class Augmented(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        (x,) = super().__getitem__(index)
        return (x + torch.rand(2),)


class Streamed(IterableDataset[Any]):
    """The same without an order of the trainer's."""

    def __iter__(self) -> Iterator[Any]:
        data = Augmented(torch.arange(22.0).view(11, 2))
        return (data[index] for index in range(11))


LOADERS = {
    "ordered": lambda: DataLoader(Augmented(torch.arange(22.0).view(11, 2)), 2),
    "replayed": lambda: DataLoader(Streamed(), 2),
}


def logged(folder: Path, kind: str, **options: Any) -> list[str]:
    """What a fit, or its resume, has logged."""
    torch.manual_seed(0)
    shown = {"loggers": ["csv"], "log_every_n_steps": 1, "val_every_n_steps": 3}
    made = quiet(default_root_dir=folder, run_name="run", **shown, **options)
    made.fit(Noisy(), LOADERS[kind](), LOADERS[kind]())
    return (folder / "run" / "metrics.csv").read_text().splitlines()


@pytest.mark.parametrize("kind", sorted(LOADERS))
def test_a_fit_and_its_resume_are_the_same_to_the_last_digit(kind, tmp_path, request):
    alone = logged(tmp_path / "alone", kind, max_epochs=2)
    assert len(alone) > 20
    streams = request.getfixturevalue("streams")
    assert logged(tmp_path / "ahead", kind, max_epochs=2) == alone
    assert len(streams) >= 4  # epochs and validations
    copies = [stream.log.count("copy") for stream in streams]
    assert copies.pop(0) == (1 if kind == "ordered" else 6)  # a sanity check of one batch
    assert set(copies) == {6}
    logged(tmp_path / "resumed", kind, max_steps=5)
    assert logged(tmp_path / "resumed", kind, max_epochs=2, resume="auto") == alone
