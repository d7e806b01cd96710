"""Validation, test and prediction do not affect training."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from my_project_trainer import Trainer, UserError
from my_project_trainer.loop import trials
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fitting import Descends, quiet


def make(folder: Path, **options: Any) -> Trainer:
    return quiet(**{"max_epochs": 2, "default_root_dir": folder, **options})


class Draws(Descends):
    """Dropout in training; validation draws from every random number generator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.modes: dict[str, set[tuple[bool, ...]]] = {}

    def _note(self, stage: str) -> None:
        mode = (self.training, self.dropout.training, self.frozen.training)
        self.modes.setdefault(stage, set()).add(mode)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._note("training")
        return (self.dropout(self.weight) * batch).sum() * random.random() * np.random.rand()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._note("validation")
        assert not torch.is_grad_enabled()
        torch.rand(3), random.random(), np.random.rand()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._note("test")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._note("predict")
        return self.dropout(torch.ones(8))


def test_random_numbers_of_validation_change_nothing_in_training(tmp_path: Path) -> None:
    trained = []
    for options, loaders in (({}, ()), ({"val_every_n_steps": 1}, ([torch.ones(1)],))):
        module = Draws()
        run = make(tmp_path, run_name=f"{len(trained)}", **options)
        run.fit(module, [torch.ones(1)] * 3, *loaders)
        trained.append(module.weight.detach())
    assert trained[0].equal(trained[1])


def test_evaluation_runs_in_eval_mode_and_restores_the_mode_of_each_module(tmp_path: Path) -> None:
    module = Draws()
    run = make(tmp_path)
    run.fit(module, [torch.ones(1)] * 2, [torch.ones(1)])
    run.test(module, [torch.ones(1)])
    (predicted,) = run.predict(module, [torch.ones(1)])
    off = {(False, False, False)}
    expected = {"training": {(True, True, False)}, "validation": off, "test": off, "predict": off}
    assert module.modes == expected
    assert predicted.equal(torch.ones(8))  # nothing is dropped
    assert (module.training, module.dropout.training, module.frozen.training) == (True, True, False)


class Epochs(IterableDataset[Tensor]):
    """A stream with ``set_epoch``."""

    def __init__(self) -> None:
        self.epoch = -1
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __iter__(self) -> Any:
        return iter([torch.full((1,), float(self.epoch))] * 3)


def test_set_epoch_is_called_on_a_data_set_for_each_epoch_and_after_a_resume(tmp_path):
    uninterrupted, resumed = Epochs(), Epochs()
    options = {"run_name": "run", "checkpoint_every_n_steps": 1}
    make(tmp_path, **options, max_steps=4).fit(Draws(), DataLoader(uninterrupted))
    make(tmp_path, **options, resume="auto").fit(Draws(), DataLoader(resumed))
    assert (uninterrupted.told, resumed.told) == ([0, 1], [1])


EIGHT: Any = [torch.ones(1)] * 8  # samples


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_largest_batch_leaves_each_replica_one(replicas: int) -> None:
    loader, device = DataLoader(EIGHT), torch.device("cpu")
    size, why = trials.find_batch_size(Draws(), loader, device, "32-true", replicas)
    assert size == 8 // replicas
    of_all = f" for {replicas} replicas" if replicas > 1 else ""
    assert why == f"; no larger one was tried: the dataset has 8 samples{of_all}"


def test_a_batch_that_does_not_fit_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_more_than_five(alone: object, module: object, loader: object, size: int) -> None:
        if size > 5:
            raise MemoryError

    monkeypatch.setattr(trials, "_try", refuse_more_than_five)
    loader, device = DataLoader(EIGHT), torch.device("cpu")
    assert trials.find_batch_size(Draws(), loader, device, "32-true", 1) == (5, "")


class Gathers(Descends):
    """Gathers in steps of evaluations; logs the mean, and counts the samples that count."""

    def __init__(self, trains: bool = True) -> None:
        super().__init__()
        self.weight, self.trains = nn.Parameter(torch.ones(1)), trains

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.trains
        return (batch * self.weight).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.all_gather(batch.sum())
        self.log("mean", batch.mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch + 0 * self.all_gather(batch).sum()

    def on_validation_epoch_end(self) -> None:
        self.all_gather(self.weight)


def test_a_gather_in_an_evaluation_needs_all_ranks(tmp_path: Path) -> None:
    samples, even = [DataLoader(torch.arange(float(count)), batch_size=2) for count in (6, 8)]
    ranks = {"devices": 2, "strategy": "ddp_fork", "max_epochs": 1}
    with pytest.raises(UserError, match="all_gather: some ranks have no such batch of this eval"):
        make(tmp_path, **ranks).fit(Gathers(trains=False), even, samples)  # before the first step
    module = Gathers()
    run = make(tmp_path, **ranks, uneven_inputs="join")
    run.fit(module, even, samples)
    assert run.metrics["mean"] == 2.5
    assert torch.cat(run.predict(module, samples)).tolist() == list(range(6))
    make(tmp_path, **ranks).fit(module, even, even)
    make(tmp_path, **ranks, fast_dev_run=True).fit(module, even, even)  # one batch
