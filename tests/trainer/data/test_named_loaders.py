"""Several loaders of an evaluation, in a dict by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import Trainer
from my_project_trainer.callbacks import BestCheckpoint, EarlyStopping
from my_project_trainer.checkpoint import Checkpoint
from my_project_trainer.errors import ConfigurationError, UserError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from fitting import Descends, quiet, rows


def loader(*numbers: float, size: int = 2) -> DataLoader[Any]:
    return DataLoader(torch.tensor(numbers).float(), batch_size=size)


LOADERS = {"clean": loader(1, 2, 3), "noisy": loader(10, 20, 30, 40, 50)}


class Net(Descends):
    """Logs means, and a metric object for both loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.sum = SumMetric()
        self.seen: list[tuple[str, int, list[float]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.dataloader_name == ""
        self.log("loss", loss := self.weight * batch.mean())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.dataloader_name == self.trainer.dataloader_name
        self.seen.append((self.dataloader_name, batch_idx, batch.tolist()))
        self.log("val_loss", batch.mean())
        self.log("largest", batch.max(), reduce_fx="max")
        self.sum.update(batch)
        self.log("sum", self.sum)

    def on_validation_epoch_end(self) -> None:
        assert self.dataloader_name == ""
        self.log("batches", float(len(self.seen)))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", batch.mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch + len(self.dataloader_name)

    def train_dataloader(self) -> Any:
        return loader(1, 1, size=1)

    def val_dataloader(self) -> Any:
        return LOADERS

    test_dataloader = predict_dataloader = val_dataloader


def make(folder: Path, **options: Any) -> Trainer:
    named = {"default_root_dir": folder, "run_name": "run", "loggers": ["csv"]}
    return quiet(**{"max_epochs": 3} | named | options)


def test_values_are_logged_by_name_over_their_own_loader(tmp_path: Path) -> None:
    module = Net()
    best = BestCheckpoint("val_loss/clean")
    trainer = make(tmp_path, callbacks=[EarlyStopping("val_loss/noisy", patience=1), best])
    trainer.fit(module)
    checked = [("clean", 0, [1, 2]), ("noisy", 0, [10, 20])]
    full = [checked[0], ("clean", 1, [3]), checked[1], ("noisy", 1, [30, 40]), ("noisy", 2, [50])]
    assert module.seen == checked + 2 * full  # the second validation is no better, and stops
    expected = {
        **{"val_loss/clean": 2, "largest/clean": 3, "sum/clean": 6},
        **{"val_loss/noisy": 30, "largest/noisy": 50, "sum/noisy": 150},
    }
    assert {name: trainer.metrics[name] for name in expected} == expected
    of_step_2 = {name: value for step, _, name, value in rows(tmp_path / "run") if step == 2}
    assert {name: value for name, value in of_step_2.items() if "/" in name} == expected
    assert trainer.metrics["batches"] == len(module.seen)
    assert Checkpoint(tmp_path / "run" / "best").step == 2  # of the first validation


def test_limits_apply_to_each_loader(tmp_path: Path) -> None:
    module = Net()
    make(tmp_path, max_epochs=1, limit_val_batches=1, sanity_check=0).fit(module)
    assert module.seen == [("clean", 0, [1, 2]), ("noisy", 0, [10, 20])]


def test_validate_test_and_predict(tmp_path: Path) -> None:
    trainer, module = make(tmp_path), Net()
    assert trainer.test(module) == {"test_loss/clean": 2, "test_loss/noisy": 30}
    assert trainer.validate(module, {"only": loader(4, 8)})["val_loss/only"] == 6
    predicted = trainer.predict(module)
    assert {name: torch.cat(outputs).tolist() for name, outputs in predicted.items()} == {
        "clean": [6, 7, 8],
        "noisy": [15, 25, 35, 45, 55],
    }
    assert trainer.predict(module, loader(4, 8))[0].tolist() == [4, 8]


@pytest.mark.parametrize(
    ("loaders", "line"),
    [
        ({}, "the trainer was given an empty dict: give one loader, or a dict of them by name"),
        ({1: LOADERS["clean"]}, "the trainer was given a loader named 1: give each a name"),
        ({"": LOADERS["clean"]}, "the trainer was given a loader named ''"),
        ({"a": 3}, "the trainer was given, as 'a', int, which is not an iterable of batches"),
        ({"a": [LOADERS["clean"]]}, "the trainer was given, as 'a', a list of loaders: one"),
    ],
    ids=["empty", "number", "unnamed", "no-loader", "nested"],
)
def test_refusals(tmp_path: Path, loaders: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        make(tmp_path).validate(Net(), loaders)


def test_lightnings_index_of_a_loader_is_that_of_a_list(tmp_path: Path) -> None:
    seen: list[int] = []

    class Needed(Net):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
            seen.append(dataloader_idx)
            super().validation_step(batch, batch_idx)

    class WithDefault(Needed):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)

    for kind in (Needed, WithDefault):
        metrics = make(tmp_path).validate(kind(), [loader(1), loader(2)])
        assert metrics["val_loss/dataloader_idx_0"] == 1
        assert [*dict.fromkeys(seen)] == [0, 1]
        seen.clear()
        assert make(tmp_path).validate(kind(), loader(1))["val_loss"] == 1
        assert {*seen} == {0}
        line = "takes dataloader_idx, which a dict of loaders has not: use self.dataloader_name"
        with pytest.raises(ConfigurationError, match=line):
            make(tmp_path).validate(kind(), LOADERS)
        seen.clear()
