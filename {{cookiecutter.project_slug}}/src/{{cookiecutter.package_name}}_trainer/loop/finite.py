"""Stop a fit at a loss that is not finite (NaN or infinite), before it overwrites good weights.

Losses are checked on their device, and read only where a step synchronizes anyway.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..checkpoint import dtensors
from ..errors import UserError
from ..launch import collectives

# Losses to collect before they are checked together: one or two kernels per loss instead of ten.
_BLOCK = 64
# The value of fairseq's --min-loss-scale. A scaler that starts at 65536 reaches it after 30
# consecutive steps with non-finite gradients.
_SMALLEST_SCALE = 1e-4


class NotFinite(UserError):
    """A loss or a parameter is not finite; raised on every rank.

    Args:
        line: The whole error.
        what: Its first part, which says what is not finite.
    """

    def __init__(self, line: str, what: str = "") -> None:
        super().__init__(line)
        self.what = what


class _Position(Protocol):
    global_step: int
    """Number of optimizer steps."""


class FiniteGuard:
    """Records the first step with a non-finite loss, and stops the fit after it.

    With a gradient scaler (``16-mixed``), a step with non-finite gradients is skipped and the scale
    is reduced: this does not damage the weights, so such a loss does not count. If losses stay
    non-finite, the scale keeps falling, and stops the fit. Nor does a loss count if the loop skips
    such steps (``nonfinite_loss="skip"``).

    Args:
        device: Device of the losses.
        scaler: The gradient scaler, if there is one.
        position: Current position of the training.
        newest: Returns the newest checkpoint of the run.
        block: Number of losses that are checked together; ``None``: the default.
    """

    def __init__(
        self,
        device: torch.device,
        scaler: torch.amp.GradScaler | None,
        position: _Position,
        newest: Callable[[], Path | None],
        block: int | None = None,
    ) -> None:
        self._scaler, self._position, self._newest = scaler, position, newest
        self.is_on, self.counts_losses = True, scaler is None
        block = block or _BLOCK
        # In double precision, in which a finite loss of another type stays finite.
        self._losses = torch.zeros(block, dtype=torch.float64, device=device)
        self._steps = torch.zeros(block, dtype=torch.float64, device=device)
        self._slots = list(zip(self._losses.split(1), self._steps.split(1), strict=True))
        self._first = torch.full((1,), math.inf, dtype=torch.float64, device=device)
        self._used = 0
        self._checked_at = 0

    def note(self, loss: Tensor) -> None:
        """Record a loss before its backward, without synchronization."""
        if not (self.is_on and self.counts_losses):
            return
        loss_slot, step_slot = self._slots[self._used]
        loss_slot.copy_(loss.detach())
        step_slot.fill_(self._position.global_step + 1)
        self._used += 1
        if self._used == len(self._slots):
            self._check_collected()

    def _check_collected(self) -> None:
        steps = torch.where(self._losses.isfinite(), math.inf, self._steps)
        self._first = torch.minimum(self._first, steps.min())
        self._losses.zero_()
        self._used = 0

    def forget(self) -> None:
        """Forget the losses so far, after a rollback."""
        self._losses.zero_()
        self._first.fill_(math.inf)
        self._used = 0

    def check(self) -> bool:
        """Read the losses so far; called by all ranks after the same step.

        Returns:
            Whether there were any since the last call.

        Raises:
            NotFinite: A loss was not finite.
        """
        steps = self._position.global_step
        if self._checked_at == steps or not self.is_on:
            return False
        self._checked_at = steps
        if self._scaler is not None:
            scale = _smallest(torch.tensor(self._scaler.get_scale(), dtype=torch.float64))
            if scale < _SMALLEST_SCALE:
                self._refuse(
                    f"the gradient scaler's scale fell to {scale:.1g} by step {steps}: "
                    "the losses or gradients of all recent steps were not finite"
                )
            return True
        if not self.counts_losses:
            return False
        self._check_collected()
        world_size = collectives.world_size()
        first = _smallest(self._first * world_size + collectives.rank())
        if first < math.inf:
            step, rank = divmod(int(first), world_size)
            self._refuse(f"the loss of step {step} is not finite (NaN or infinite) on rank {rank}")
        return True

    def check_weights(self, model: Mapping[str, Any], module: nn.Module) -> None:
        """Check the weights before they are saved: a finite loss may have an infinite gradient.

        Args:
            model: Tensors by name; each rank checks what it holds.
            module: Only its trainable parameters are checked; others, and buffers, may be infinite
                on purpose.

        Raises:
            NotFinite: A parameter is not finite.
        """
        if not self.is_on:
            return
        trained = (name for name, each in module.named_parameters() if each.requires_grad)
        found = first_not_finite({name: model[name] for name in trained if name in model})
        rank = collectives.rank() if found is not None else math.inf
        rank = _smallest(torch.tensor(float(rank), dtype=torch.float64))
        if rank < math.inf:
            name = next(each for each in collectives.gather(found) if each is not None)
            self._refuse(
                f"parameter {name} is not finite (NaN or infinite) on rank {int(rank)} after step "
                f"{self._position.global_step}, and is not saved"
            )

    def _refuse(self, what: str) -> None:
        newest = self._newest()
        last = f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"
        raise NotFinite(
            f"{what}; {last}; lower the learning rate or set gradient_clip_val, or train on with "
            "--trainer.nonfinite_loss skip or rollback",
            what,
        )


def first_not_finite(tensors: Mapping[str, Any]) -> str | None:
    """Name of the first tensor with a non-finite value in this process."""
    with torch.no_grad():
        bounds = {name: _bound(each) for name, each in tensors.items() if _has_values(each)}
    if not bounds:
        return None
    # One synchronization for all, and no copy of large tensors, as isfinite would make.
    finite = torch.stack([each.cpu() for each in bounds.values()]).isfinite().tolist()
    return next((name for name, good in zip(bounds, finite, strict=True) if not good), None)


def _has_values(value: object) -> bool:
    if not isinstance(value, Tensor):
        return False
    part = dtensors.local(value)
    return part.numel() > 0 and (part.is_floating_point() or part.is_complex())


def _bound(value: Tensor) -> Tensor:
    """A number that is not finite if any value of the tensor is not."""
    part = dtensors.local(value.detach())
    least, most = torch.aminmax(torch.view_as_real(part) if part.is_complex() else part)
    # Not their difference, which may overflow.
    return torch.maximum(least.double().abs(), most.double().abs())


def _smallest(value: Tensor) -> float:
    return float(collectives.all_reduce(value.reshape(1), "min"))
