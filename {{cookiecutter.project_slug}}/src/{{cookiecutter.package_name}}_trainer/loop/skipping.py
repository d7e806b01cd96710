"""Skip steps with gradients that are not finite (``nonfinite_loss="skip"``); no gradient scaler."""

import math
import sys

from torch import Tensor

from ..checkpoint import dtensors
from ..errors import UserError
from ..launch import collectives

# Consecutive skipped steps after which a fit ends: about as many as with a gradient scaler.
MOST_IN_A_ROW = 30


class Skipping:
    """Decides after each backward whether to skip the step; the same on every rank."""

    def __init__(self) -> None:
        self.count = 0
        """Skipped steps since the start of the fit, or since it was resumed."""
        self._in_a_row = 0

    def skips(self, norm: Tensor, step: int) -> bool:
        """Whether the gradients of a step, counted from 1, are not finite. Reads the norm.

        Args:
            norm: Norm of the gradients over the whole model.
            step: Number of the step.

        Raises:
            UserError: So many steps in a row were skipped that training cannot recover.
        """
        if math.isfinite(float(dtensors.whole(norm))):
            self._in_a_row = 0
            return False
        self.count += 1
        self._in_a_row += 1
        if self._in_a_row == MOST_IN_A_ROW:
            raise UserError(
                f"the gradients of {MOST_IN_A_ROW} steps in a row, up to step {step}, are not "
                "finite; lower the learning rate, or resume from an earlier checkpoint"
            )
        if collectives.rank() == 0:
            print(
                f"warning: step {step} is skipped, because its gradients are not finite (NaN or "
                f"infinite); steps skipped so far: {self.count}",
                file=sys.stderr,
                flush=True,
            )
        return True
