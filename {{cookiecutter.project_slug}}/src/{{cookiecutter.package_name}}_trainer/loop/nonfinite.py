"""What a fit does about losses that are not finite: the trainer's ``nonfinite_loss``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..checkpoint import Checkpoints
from .finite import FiniteGuard, NotFinite
from .parts import FitParts
from .rollback import Rollback
from .skipping import Skipping


class NonfinitePolicy:
    """Applies the policy; all ranks call its methods after the same step.

    Args:
        fit: The parts of the fit.
        checkpoints: Those of the run.
    """

    def __init__(self, fit: FitParts, checkpoints: Checkpoints) -> None:
        strategy, policy = fit.strategy, fit.options.nonfinite_loss
        self._fit = fit
        self._guard = FiniteGuard(
            strategy.device,
            strategy.precision.scaler,
            fit.position,
            checkpoints.newest,
            block=1 if strategy.compiles_steps else None,
        )
        self._guard.is_on = policy != "ignore"
        self._skipping: Skipping | None = None
        # A gradient scaler skips steps by itself.
        if policy == "skip" and strategy.precision.scaler is None:
            self._guard.counts_losses = False
            self._skipping = Skipping()
        self._rollback = Rollback(fit, checkpoints) if policy == "rollback" else None
        strategy.note_loss = self._guard.note

    @property
    def needs_norm(self) -> bool:
        """Whether :meth:`skips` needs the norm of the gradients in each step."""
        return self._skipping is not None

    def skips(self, norm: Tensor | None) -> bool:
        """Whether a step is skipped, because the norm of its gradients is not finite."""
        if self._skipping is None or norm is None:
            return False
        return self._skipping.skips(norm, self._fit.position.global_step + 1)

    def check(self) -> None:
        """Check the losses so far.

        Raises:
            NotFinite: One is not finite, and there is no rollback.
        """
        try:
            if self._guard.check() and self._rollback is not None:
                self._rollback.note_finite_losses()
        except NotFinite as error:
            self._roll_back(error)

    def check_weights(self, model: Mapping[str, Any]) -> bool:
        """Check the weights before they are saved.

        Returns:
            Whether there was a rollback, so that the state to save is another one.

        Raises:
            NotFinite: A parameter is not finite, and there is no rollback.
        """
        try:
            self._guard.check_weights(model, self._fit.module)
        except NotFinite as error:
            self._roll_back(error)
            return True
        if self._rollback is not None:
            self._rollback.note_finite_weights()
        return False

    def _roll_back(self, error: NotFinite) -> None:
        if self._rollback is None:
            raise error
        self._rollback.restore(error)
        self._guard.forget()
