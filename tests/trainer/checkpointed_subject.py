"""Trains with activation checkpointing and without; started by test_activation_checkpointing.py.

``python -m checkpointed_subject FOLDER OPTIONS`` takes the trainer's options as JSON and
writes the weights of three runs: ``kept`` keeps all activations, ``again`` computes them again in
backward, and ``resumed`` was stopped on the way.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from my_project_trainer.checkpoint import reading as checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import fitting

STOP = 3
FEATURES = 8


class Block(nn.Module):
    """BatchNorm, dropout and a buffer that counts; called by keyword."""

    forwards = 0

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 4 * FEATURES)
        self.norm = nn.BatchNorm1d(4 * FEATURES, momentum=momentum)
        self.dropout = nn.Dropout(0.3)
        self.second = nn.Linear(4 * FEATURES, FEATURES)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        Block.forwards += 1
        self.calls += 1
        return x + scale * self.second(self.dropout(self.norm(self.first(x))).tanh())


class Network(nn.Module):
    """Blocks, one of them called twice, and norms of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(momentum=None), Block()])
        self.images = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Tanh())
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.new_ones(1) / 2
        for layer in (*self.layers, self.layers[0]):
            x = layer(x, scale=scale)
        return self.head(self.images(x.view(len(x), 2, -1)).flatten(1))


class Model(fitting.Descends, lr=0.05, momentum=0.9):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = Network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.network(x), y)
        self.log("forwards", float(Block.forwards), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        before = Block.forwards
        self.network(batch[0])
        self.log("forwards_in_validation", float(Block.forwards - before))

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(48, FEATURES, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def train(
    folder: Path, name: str, options: dict[str, Any], **more: Any
) -> tuple[dict[str, Tensor], Path]:
    """Weights and metrics after a run, and where it lies."""
    Block.forwards = 0
    model, shared = Model(), {"max_epochs": 1, "global_batch_size": 12, "devices": "auto"}
    run = fitting.fit(model, folder, **{**shared, "run_name": name, **options, **more})
    metrics = {f"metrics.{key}": torch.tensor(value) for key, value in run.metrics.items()}
    found = {**_weights(model, run), **metrics}
    if run.global_rank == 0:
        save_file({key: each.contiguous() for key, each in found.items()}, folder / f"{name}.file")
    return found, run.run_directory


def _weights(model: Model, run: Any) -> dict[str, Tensor]:
    """The full tensors, whether the strategy shards them or not."""
    if run._plan.strategy.limits.shards_parameters:
        return checkpoint.Checkpoint(checkpoint.resolve(run.run_directory)).state()["model"]
    return model.state_dict()


def main(folder: Path, options: dict[str, Any]) -> None:
    again = {"activation_checkpointing": ["Block", "network.images"]}
    train(folder, "kept", options)
    train(folder, "again", options, **again)
    _, stopped = train(
        folder, "stopped", options, **again, max_steps=STOP, checkpoint_every_n_steps=1
    )
    train(folder, "resumed", options, **again, resume=str(stopped))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
