"""What ``training_step`` returned for a micro-batch, for hooks."""

from typing import Any

import torch
from torch import Tensor

from ..data import moving
from ..strategies.replicated.dp import gather


class StepOutputs:
    """Collects the outputs of a micro-batch: several if its strategy divides it.

    Args:
        device: Where several are gathered.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Any] = []

    def note(self, outputs: Any) -> None:
        """Keep outputs, without their gradients."""
        self._parts.append(moving.mapped(outputs, _detached))

    def take(self) -> Any:
        """The outputs since the last call, gathered as ``dp`` does; ``None`` without any."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        outputs = parts[0] if len(parts) == 1 else gather(parts, self._device)
        return {"loss": outputs} if isinstance(outputs, Tensor) else outputs


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
