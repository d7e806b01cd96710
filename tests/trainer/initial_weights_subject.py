"""Trains a model from weights; started by test_initial_weights.py.

``python -m initial_weights_subject WEIGHTS STRATEGY …`` trains with two ranks by each strategy in
turn; with ``meta:STRATEGY``, a model that is built on the meta device.
"""

import sys
from typing import Any

import my_project_trainer as trainer
import torch
from torch import nn

import averaging_subject

OPTIONS = {**averaging_subject.OPTIONS, "mesh": {"data": 1, "shard": 2}}
STEPS = 3


class Net(averaging_subject.Net):
    """A network whose layers can be created on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.sequential_module.parameters():
            if not each.is_meta:
                each.data.mul_(0.5)

    def initialize(self, name: str, layer: nn.Module) -> None:
        for each in layer.parameters(recurse=False):
            nn.init.constant_(each, 0.1)


def fit(module: trainer.TrainingModule, name: str, **options: Any) -> trainer.Trainer:
    """Train for three steps."""
    shared: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "loggers": [], "run_name": name}
    made = trainer.Trainer(**shared | {"max_steps": STEPS, "limit_val_batches": 0} | options)
    made.fit(module)
    return made


def build(made: trainer.Trainer) -> Net:
    """The module, as a trainer builds it."""
    with made.building():
        return Net()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for word in sys.argv[2:]:
        meta, _, chosen = word.rpartition(":")
        made = trainer.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=chosen,
            strategy_options=OPTIONS.get(chosen),
            global_batch_size=4,
            max_steps=STEPS,
            limit_val_batches=0,
            loggers=[],
            run_name=word.replace(":", "-"),
            weights=sys.argv[1],
            meta_device=bool(meta),
        )
        made.fit(build(made))
