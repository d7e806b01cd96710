"""A model that can be built on the meta device and starts from weights, and a short fit of it."""

from typing import Any

import my_project_trainer as trainer
from torch import nn

import averaging_subject

STEPS = 3


class Net(averaging_subject.Net):
    """A network whose layers can be created on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.sequential_module.parameters():
            if not parameter.is_meta:
                parameter.data.mul_(0.5)

    def initialize(self, name: str, layer: nn.Module) -> None:
        for parameter in layer.parameters(recurse=False):
            nn.init.constant_(parameter, 0.1)


def fit(module: trainer.TrainingModule, name: str, **options: Any) -> trainer.Trainer:
    shared: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "loggers": [], "run_name": name}
    made = trainer.Trainer(**shared | {"max_steps": STEPS, "limit_val_batches": 0} | options)
    made.fit(module)
    return made
