"""Stop training when a value no longer improves."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError
from ..module import Run, TrainingModule
from .base import Callback
from .monitor import Mode, Monitor


class EarlyStopping(Callback):
    """Stop training when a logged value has not improved for some validations.

    A run that resumes continues to count.

    Args:
        monitor: Name of the value, such as ``"val_loss"``.
        patience: Number of validations without an improvement after which training stops.
        mode: ``"min"``: lower values are better; ``"max"``: higher ones.
        min_delta: The least change that counts as an improvement.

    Raises:
        ConfigurationError: An argument is invalid.
        UserError: At the first validation: no such value is logged.
    """

    def __init__(
        self, monitor: str, patience: int = 3, mode: Mode = "min", min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise ConfigurationError(f"EarlyStopping: patience={patience}: give at least 1")
        self._monitor = Monitor(monitor, mode, min_delta, "EarlyStopping")
        self.monitored = monitor
        self.patience = patience
        self.best: float | None = None
        """The best value so far."""
        self.waited = 0
        """Number of validations since the best value."""

    def on_validation_end(self, trainer: Run, module: TrainingModule) -> None:
        value = self._monitor.read(trainer.metrics)
        if self._monitor.is_better(value, self.best):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            name = self._monitor.name
            trainer.stop(f"{name} has not improved on {self.best} for {self.waited} validations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best = state["best"]
        self.best, self.waited = best if best is None else float(best), int(state["waited"])
