"""Average the weights of many steps, and validate with the average."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checkpoint import read_all
from ..errors import ConfigurationError
from ..module import Run, TrainingModule, Weights
from .base import Callback

AVERAGE = "average"
_HALF = (torch.bfloat16, torch.float16)


class EMA(Callback):
    """Exponential moving average of the trainable parameters: validations of the fit use it.

    After a step, ``average = decay * average + (1 - decay) * parameter``; the first average is the
    parameters after the first such step. A step that a gradient scaler skips does not count.
    Buffers are not averaged: validations use the current ones. Training and the weights in
    checkpoints are not changed; checkpoints contain the average beside them. To evaluate it, write
    it with :func:`~.averaged.save_averaged`.

    It needs the memory of another copy of this process' parameters, or shards, in float32 if they
    are in half precision; in validations, of two.

    Args:
        decay: Part of the average that an update keeps, from 0 to below 1.
        every_n_steps: Number of optimizer steps per update; of batches in manual optimization.

    Raises:
        ConfigurationError: An argument is out of range.

    Source: https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
    """

    needs: ClassVar[tuple[str, ...]] = ("parameter_averaging",)

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1) -> None:
        problems = []
        if not 0 <= decay < 1:
            problems.append(f"EMA: decay={decay!r}: give a number from 0 to below 1")
        if every_n_steps < 1:
            problems.append(f"EMA: every_n_steps={every_n_steps!r}: give at least 1")
        if problems:
            raise ConfigurationError(problems)
        self.decay, self.every_n_steps = decay, every_n_steps
        self.average: dict[str, Tensor] = {}
        """The average by parameter name: this process' parts."""
        self.steps = 0
        """Number of steps that were not skipped."""
        self._weights: Weights | None = None
        self._trained: dict[str, Tensor] = {}
        """The parameters, while the module has their average."""

    def on_fit_start(self, trainer: Run, module: TrainingModule) -> None:
        self._weights = trainer.weights()
        self.average, self.steps = {}, 0
        trainer.has_skipped_step()  # notes the scale

    @torch.no_grad()
    def on_after_optimizer_step(self, trainer: Run, module: TrainingModule) -> None:
        if trainer.has_skipped_step():
            return
        self.steps += 1
        if self.steps % self.every_n_steps:
            return
        weights = self._own_weights()
        names = weights.trained()
        new = [name for name in names if name not in self.average]
        known = [name for name in names if name in self.average]
        if known:
            averages = [self.average[name] for name in known]
            parts = _as(averages, weights.parts(known))
            torch._foreach_lerp_(averages, parts, 1 - self.decay)
        for name, part in zip(new, weights.parts(new), strict=True):
            self.average[name] = _precise(part)

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
            raise RuntimeError("EMA averages the weights of a fit only")
        return self._weights

    def state_dict(self) -> dict[str, Any]:
        average = self._own_weights().state(self.average)
        return {AVERAGE: average, "steps": self.steps}

    def load_stored_state(self, state: Mapping[str, Any]) -> None:
        self.average = self._own_weights().load(state[AVERAGE])
        self.steps = read_all(state["steps"])

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
