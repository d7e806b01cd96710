"""What averages of the weights have in common: validations use them, checkpoints contain them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checkpoint import AVERAGE, read_all
from ..module import Run, TrainingModule, Weights
from .base import Callback

_HALF = (torch.bfloat16, torch.float16)


class WeightAverage(Callback):
    """An average of the trainable parameters; subclasses call :meth:`update`.

    Validations of the fit use it, once there is one. Buffers are not averaged. Training and the
    weights in checkpoints are not changed; checkpoints contain the average beside them, and what
    evaluates or exports a checkpoint uses it, unless ``averaged`` is False.

    It needs the memory of another copy of this process' parameters, or shards, in float32 if they
    are in half precision; in validations, of two.
    """

    needs: ClassVar[tuple[str, ...]] = ("parameter_averaging",)
    belongs_to_weights = True

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        """The average by parameter name: this process' parts."""
        self.count = 0
        """Number of steps, or of epochs, that were counted."""
        self._weights: Weights | None = None
        self._trained: dict[str, Tensor] = {}
        """The parameters, while the module has their average."""

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Change the average to ``(1 - weight) * average + weight * parameter``."""
        weights = self._own_weights()
        names = weights.trained()
        new = [name for name in names if name not in self.average]
        known = [name for name in names if name in self.average]
        if known:
            averages = [self.average[name] for name in known]
            parts = _as(averages, weights.parts(known))
            torch._foreach_lerp_(averages, parts, weight)
        for name, part in zip(new, weights.parts(new), strict=True):
            self.average[name] = _precise(part)

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        self._weights = trainer.weights()
        self.average, self.count = {}, 0

    @torch.no_grad()
    def on_validation_start(self, trainer: Run, module: TrainingModule) -> None:
        weights = self._own_weights()
        parts = zip(self.average, weights.parts(self.average), strict=True)
        self._trained = {name: torch.clone(part) for name, part in parts}
        weights.put(self.average)

    def on_validation_end(self, trainer: Run, module: TrainingModule) -> None:
        self._own_weights().put(self._trained)
        self._trained = {}

    def on_fit_end(self, trainer: Run, module: TrainingModule) -> None:
        self._weights = None  # it holds what the strategy closes

    def on_exception(self, trainer: Run, module: TrainingModule, error: BaseException) -> None:
        self._weights, self._trained = None, {}

    def _own_weights(self) -> Weights:
        if self._weights is None:
            raise RuntimeError(f"{type(self).__name__} averages the weights of a fit only")
        return self._weights

    def state_dict(self) -> dict[str, Any]:
        average = self._own_weights().state(self.average)
        return {AVERAGE: average, "count": self.count}

    def load_stored_state(self, state: Mapping[str, Any]) -> None:
        self.average = self._own_weights().load(state[AVERAGE])
        self.count = int(read_all(state["count"]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.load_stored_state(state)


def _precise(part: Tensor) -> Tensor:
    """A copy of a part in the data type of its average."""
    return part.to(torch.float32 if part.dtype in _HALF else part.dtype, copy=True)


def _as(averages: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    """Parts in the data types of their averages."""
    return [
        part if part.dtype == average.dtype else part.to(average.dtype)
        for average, part in zip(averages, parts, strict=True)
    ]
