"""Restore the weights of the newest checkpoint (``nonfinite_loss="rollback"``).

Training continues with the next batches: repeating the same ones would give the same loss.

Source: section 5.1 of PaLM, https://arxiv.org/abs/2204.02311, which skips batches around a spike.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import Checkpoint, Checkpoints
from ..errors import UserError
from ..launch import collectives
from . import saving
from .finite import NotFinite
from .parts import FitParts

# Rollbacks without a new good checkpoint, after which a fit ends.
MOST = 3


class Rollback:
    """Restores weights, optimizers and averages of the weights; the same on every rank.

    Steps, data, schedules, random numbers and other callbacks continue.

    Args:
        fit: The parts of the fit.
        checkpoints: Those of the run.
    """

    def __init__(self, fit: FitParts, checkpoints: Checkpoints) -> None:
        self._fit = fit
        self._checkpoints = checkpoints
        self._count = 0
        """Rollbacks since the last good checkpoint."""
        self._has_trained = False
        """Whether a check found only finite losses since the last rollback."""

    def note_finite_losses(self) -> None:
        """Note that all losses since the last check are finite."""
        self._has_trained = True

    def note_finite_weights(self) -> None:
        """Note that a checkpoint is saved; it is a good one if its weights were trained."""
        if self._has_trained:
            self._count = 0

    def restore(self, error: NotFinite) -> None:
        """Restore the weights; called by all ranks after the same step.

        Raises:
            NotFinite: There is no checkpoint.
            UserError: So many rollbacks did not help that training cannot recover.
        """
        newest = collectives.broadcast(str(self._checkpoints.newest() or ""))
        if not newest:
            raise error
        path = Path(newest)
        self._count, self._has_trained = self._count + 1, False
        if self._count > MOST:
            raise UserError(
                f"{error.what}, after {MOST} rollbacks without a good checkpoint in between; lower "
                "the learning rate or set gradient_clip_val"
            ) from error
        _restore(self._fit, Checkpoint(path))
        if collectives.rank() == 0:
            print(
                f"warning: {error.what}: restored weights and optimizers from {path}; training "
                "continues with the next batches",
                file=sys.stderr,
                flush=True,
            )


def _restore(fit: FitParts, checkpoint: Checkpoint) -> None:
    strategy, optimizers = fit.strategy, fit.optimization.optimizers
    saved = checkpoint.stored_state()
    options = _options(optimizers)
    strategy.load_state(saved, fit.optimization)
    # Schedules continue, so keep the rates that they have set.
    for group, own in zip(_groups(optimizers), options, strict=True):
        group.update(own)
    if checkpoint.world_size == strategy.layout.world_size:
        own_state = checkpoint.own(strategy.layout.rank)
        strategy.load_rank_local_state(saving.part(own_state, "strategy"))
    for name, callback in fit.calls.callbacks.items():
        if callback.belongs_to_weights and name in saved["callbacks"]:
            callback.load_stored_state(saved["callbacks"][name])
    for optimizer in optimizers:
        strategy.zero_grad(optimizer)


def _options(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """What optimizers were given, or schedulers have set, by group."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in _groups(optimizers)
    ]


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for each in optimizers for group in each.param_groups]
