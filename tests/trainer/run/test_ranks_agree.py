"""Ranks whose options, code or data differ end the run in lines that say where."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from my_project_trainer import TrainingModule, UserError
from my_project_trainer.data import randomness
from my_project_trainer.launch.start import run_in_processes
from my_project_trainer.options import Options
from my_project_trainer.run import agreement
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fitting


class Differs(TrainingModule):
    """On rank 1, what ``what`` says is another one."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what if os.environ.get("RANK") == "1" else ""
        self.layer = nn.Linear(6, 1)
        if self.what == "buffer":
            self.register_buffer("count", torch.zeros(2))
        if self.what == "dtype":
            self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        kind = torch.optim.Adam if self.what == "class" else torch.optim.SGD
        return kind(self.parameters(), lr=0.2 if self.what == "rate" else 0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(6 if self.what == "data" else 8, 6)), 2)


OPTIONS = {
    "seed": ({"seed": 4}, "seed is 0 on rank 0 and 4 on rank 1"),
    "gradient_clip_val": ({"gradient_clip_val": 1.0}, "gradient_clip_val is None on rank 0 and"),
    "precision": ({"precision": "bf16-mixed"}, "precision is '32-true' on rank 0 and 'bf16-mixed'"),
    "steps": ({"checkpoint_every_n_steps": 3}, "checkpoint_every_n_steps is None on rank 0 and 3"),
    "buffer": ({}, r"count is not there on rank 0 and \(2,\) of torch.float32 on rank 1"),
    "dtype": ({}, r".* of torch.float32 on rank 0 and .* of torch.float64 on rank 1"),
    "data": ({}, "samples of training is 8 on rank 0 and 6 on rank 1"),
    "class": ({}, "optimizer 0 is SGD on rank 0 and Adam on rank 1"),
    "rate": ({}, "lr of optimizer 0 is 0.1 on rank 0 and 0.2 on rank 1"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_what_differs_is_named(tmp_path: Path, what: str) -> None:
    options, line = OPTIONS[what]

    def train() -> None:
        overrides = options if os.environ["RANK"] == "1" else {}
        fitting.fit(Differs(what), tmp_path, devices=2, strategy="ddp", max_epochs=1, **overrides)

    with pytest.raises(UserError, match=rf"^ranks differ: {line}"):
        run_in_processes("fork", 2, train, {})


class Ours(Differs):
    """Each rank validates on samples of its own, which the trainer reads as they are."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 6)), 2)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(6 if self.what else 8, 6)), 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])), reduce_fx="sum")


def test_data_of_a_rank_s_own_may_differ(tmp_path: Path) -> None:
    def train() -> None:
        options = {"devices": 2, "strategy": "ddp", "max_epochs": 1, "sanity_check": 0}
        made = fitting.fit(Ours("own"), tmp_path, use_distributed_sampler=False, **options)
        assert made.metrics["samples"] == 14

    run_in_processes("fork", 2, train, {})


def test_options_of_an_evaluation_are_compared_too(tmp_path: Path) -> None:
    def validate() -> None:
        limit = 1 if os.environ["RANK"] == "1" else 2
        fitting.quiet(devices=2, strategy="ddp", limit_val_batches=limit).validate(Ours("own"))

    with pytest.raises(UserError, match=r"^ranks differ: limit_val_batches is 2 on rank 0 and"):
        run_in_processes("fork", 2, validate, {})


def test_files_of_a_strategy_are_compared_by_their_content(tmp_path: Path) -> None:
    for name, text in (("a", "{}"), ("b", "{}"), ("c", "{1}")):
        (tmp_path / name).write_text(text)
    configs = ({"config": str(tmp_path / name)} for name in "abc")
    a, b, c = (agreement.of_options(Options(strategy_options=config)) for config in configs)
    assert a == b != c


def test_seeds_of_steps_are_not_kept() -> None:
    before = set(randomness.OWN_SEEDS)
    randomness.seed_generators(randomness.mix(3, 4))
    assert before == randomness.OWN_SEEDS
