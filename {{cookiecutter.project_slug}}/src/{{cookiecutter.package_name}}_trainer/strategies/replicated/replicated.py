"""Base class of strategies in which every process holds the whole model in a wrapper."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from ...module import TrainingModule
from ..process_group import ProcessGroupStrategy
from ..step import Stage, StepModule, StepOutput


class Engine(Protocol):
    """A wrapper that runs training steps and averages their gradients in backward."""

    def __call__(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run a step."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context for a step and its backward in which gradients are not averaged."""


class Replicated(ProcessGroupStrategy):
    """Every process holds the whole model and reads its part of each batch.

    ``wrapped`` is the engine that wraps the module's step; ``None`` with manual optimization.
    """

    wrapped: Engine | None = None

    def place(self, module: TrainingModule) -> None:
        super().place(module)
        self.step_module = self._make_step(module)

    def _make_step(self, module: TrainingModule) -> StepModule:
        """The module that runs the user's steps on this process' devices."""
        return StepModule(module)

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> list[StepOutput]:
        # In forward, the engine decides whether the following backward averages gradients.
        waits = self.wrapped is not None and not synchronize
        with self.wrapped.no_sync() if waits and self.wrapped else nullcontext():
            return super().forward_backward(
                batch, batch_idx, weight=weight, synchronize=synchronize
            )

    def _call_step(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        if stage == "training" and self.wrapped is not None:
            return self.wrapped(stage, batch, batch_idx)
        return self.step_module(stage, batch, batch_idx)

    def backward(self, loss: Tensor, *, synchronize: bool) -> None:
        super().backward(loss, synchronize=synchronize)
        if synchronize:
            self.average_gradients()
