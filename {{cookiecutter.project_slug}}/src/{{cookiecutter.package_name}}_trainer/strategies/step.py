"""The user's step as a module that engines can wrap, and checks of the loss that it returns."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ..errors import UserError
from ..module import TrainingModule

Stage = Literal["training", "validation", "test", "predict"]


class StepOutput(NamedTuple):
    """The loss of a training step, and what it and its ``training_step_end`` returned."""

    loss: Tensor
    outputs: Any


class BatchSkipped(Exception):
    """Every rank skips a batch, because ``training_step`` returned ``None`` on at least one."""


class StepModule(nn.Module):
    """A module whose ``forward`` is the user's step, for engines that wrap a ``forward``."""

    def __init__(self, module: TrainingModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run ``training_step``, ``validation_step``, … on a batch."""
        return getattr(self.module, f"{stage}_step")(batch, batch_idx)


def read_loss(outputs: Any) -> Tensor:
    """Get the loss from the output of a training step.

    Raises:
        UserError: There is none, it is not a scalar, or there are values to log beside it.
    """
    if isinstance(outputs, Tensor) and outputs.numel() == 1:
        return outputs
    if outputs is None:
        raise UserError(
            "training_step returned None: return the loss; or, to skip the batch on all ranks, set "
            "may_skip_batches = True in the module"
        )
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise UserError(
            f"training_step must return a scalar loss, or a dict with 'loss'; it gave {found}"
        )
    for key in ("log", "progress_bar"):
        if key in outputs:
            raise UserError(
                f"training_step returned {key!r} beside 'loss', which is not logged: use self.log"
            )
    return loss


def check_loss(loss: Tensor, source: str) -> None:
    """Raise UserError if backward cannot be called on a loss."""
    if loss.numel() != 1:
        raise UserError(
            f"{source} gave a loss of shape {tuple(loss.shape)}: give a scalar, such as its mean()"
        )
    if not loss.is_floating_point():
        raise UserError(
            f"{source} gave a loss of type {loss.dtype}: give a floating-point one, computed from "
            "the module's parameters"
        )
    if not loss.requires_grad:
        raise UserError(
            f"{source} gave a loss without a gradient: compute it from the module's parameters, "
            "without detach(), item() or torch.no_grad()"
        )
