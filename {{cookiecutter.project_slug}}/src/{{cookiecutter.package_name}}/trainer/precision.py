"""Number formats of a run: what autocast computes in, and the scaler that keeps fp16 gradients."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import ConfigurationError, nearest

_AUTOCAST: dict[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
NAMES = tuple(_AUTOCAST)


class Precision:
    """Autocast and gradient scaling of a run.

    Args:
        name: ``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigurationError: the name is unknown.

    Source: https://docs.pytorch.org/docs/stable/amp.html
    """

    def __init__(self, name: str, device_type: str) -> None:
        if name not in _AUTOCAST:
            raise ConfigurationError(f"precision={name!r} is unknown{nearest(name, NAMES)}")
        self.name = name
        self.device_type = device_type
        self.dtype = _AUTOCAST[name]
        self.scaler = torch.amp.GradScaler(device_type) if name == "16-mixed" else None

    def autocast(self) -> AbstractContextManager[None]:
        """What a forward pass runs in; without a half format there is no need to."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients back to their size, once, before they are clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step, unless a scaled gradient overflowed."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def update(self) -> None:
        """Adapt the scale, after the last optimizer of a step."""
        if self.scaler is not None:
            self.scaler.update()

    def state(self) -> dict[str, float]:
        """The scaler's state; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, float]) -> None:
        """Put back what :meth:`state` gave; a run of another precision starts with a new scaler."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
