"""A callback whose state is in checkpoints."""

from collections.abc import Mapping
from typing import Any

import my_project_trainer as trainer


class Totals(trainer.Callback):
    """The number of optimizer steps, and the sum of the losses of validations."""

    def __init__(self) -> None:
        self.steps, self.loss = 0, 0.0

    def on_after_optimizer_step(self, trainer: Any, module: Any) -> None:
        self.steps += 1

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.loss += trainer.metrics["val_loss"]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "loss": self.loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.loss = state["steps"], state["loss"]
