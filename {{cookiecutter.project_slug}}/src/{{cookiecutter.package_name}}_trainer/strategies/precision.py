"""Precision of a run: autocast, the data type of parameters, and the gradient scaler."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import dtensors
from ..errors import ConfigurationError, nearest, shown

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_PARAMETERS = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
NAMES = ("32-true", *_AUTOCAST, *_PARAMETERS)
_FIRST_SCALE = 2.0**15  # the gradient of the loss: torch's 2**16 is infinite if that is float16
# Set by torch on optimizers that are fused: its gradient scaler leaves it to them to unscale.
_UNSCALES_ITSELF = "_step_supports_amp_scaling"


class _Scaler(torch.amp.GradScaler):
    """A gradient scaler for sharded (on any meshes) and full gradients, unlike torch's scalers.

    Offloaded gradients are on the CPU, and the scale is on the GPU.
    """

    def step(self, optimizer: Optimizer, *arguments: Any, **options: Any) -> float | None:
        unscales_itself = getattr(optimizer, _UNSCALES_ITSELF, None)
        if unscales_itself is None or self._device == "cpu" or not _any_on_cpu(optimizer):
            return super().step(optimizer, *arguments, **options)
        # A fused optimizer could read the copy of the overflow flag before it has arrived.
        setattr(optimizer, _UNSCALES_ITSELF, False)
        try:
            return super().step(optimizer, *arguments, **options)
        finally:
            setattr(optimizer, _UNSCALES_ITSELF, unscales_itself)

    def _unscale_grads_(self, optimizer: Optimizer, *arguments: Any) -> dict[torch.device, Tensor]:
        if _any_on_cpu(optimizer):
            # torch would copy the scale to the CPU without synchronizing, and read it at once.
            scale, overflow, *rest = arguments
            arguments = (scale.cpu(), overflow.cpu(), *rest)
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        overflows: dict[torch.device, Tensor] = {}
        for parameters in dtensors.by_mesh(every):
            stand_in: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            for device, overflow in super()._unscale_grads_(stand_in, *arguments).items():
                overflows[device] = torch.maximum(overflow, overflows.get(device, overflow))
        return overflows


def _any_on_cpu(optimizer: Optimizer) -> bool:
    return any(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])


class Precision:
    """Autocast and gradient scaling of a run, and the data type of its parameters.

    ``dtype``: data type of autocast; ``None``: no autocast. ``parameter_dtype``: data type of
    parameters, buffers and batches, and so of all computation; ``None``: as created by the user.

    Args:
        name: ``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"``: autocast with float32 parameters;
            ``"bf16-true"`` or ``"16-true"``: half precision without autocast and without gradient
            scaler. In ``"16-true"``, values below 6e-8 become zero (Adam's ``eps`` of 1e-8 too:
            use 1e-4), and values above 65504 infinite.
        device_type: ``"cpu"`` or ``"cuda"``.

    Source: https://docs.pytorch.org/docs/stable/amp.html
    """

    def __init__(self, name: str, device_type: str) -> None:
        if name not in NAMES:
            raise ConfigurationError(f"precision={shown(name)} is unknown{nearest(name, NAMES)}")
        self.name, self.device_type = name, device_type
        self.dtype, self.parameter_dtype = _AUTOCAST.get(name), _PARAMETERS.get(name)
        scaler = _Scaler(device_type, _FIRST_SCALE) if name == "16-mixed" else None
        self.scaler: torch.amp.GradScaler | None = scaler
        self._last_scale: float | None = None
        self.has_skipped = False  # set where a step is skipped, until that is asked for
        self._unscaled: set[int] = set()  # unscaled optimizers, until the next backward or step
        self._has_scaled = False  # whether the scaler has seen gradients since its last update
        self._is_together = False

    def skip_together(self) -> None:
        """Skip a step on all ranks if one finds an overflow: each has only its own gradients.

        Call this before the first step, and before the process group is initialized.
        """
        # The import would keep the current process group as a default argument.
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        if self.scaler is not None:
            self.scaler, self._is_together = ShardedGradScaler(self.device_type, _FIRST_SCALE), True

    def cast(self, tensors: Iterable[Tensor]) -> None:
        """Cast floating-point parameters and buffers to their data type, in place."""
        # Not with Module.to, which would make complex buffers real, and cast torchmetrics' state.
        if self.parameter_dtype is None:
            return
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.dtype != self.parameter_dtype:
                tensor.data = tensor.data.to(self.parameter_dtype)

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss on which to call ``backward``."""
        # A scaled loss overflows in half precision, which torch's sharded scaler would keep.
        if self.scaler is None:
            return loss
        self._unscaled.clear()
        return self.scaler.scale(loss.float())

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Unscale the gradients, once, before they are read or clipped."""
        if self.scaler is None:
            return
        for optimizer in optimizers:
            if id(optimizer) not in self._unscaled and self._has_gradients(optimizer):
                self._unscaled.add(id(optimizer))
                self._has_scaled = True
                self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step an optimizer; a scaler's step, which needs a gradient, if it has any."""
        if self.scaler is None or not self._has_gradients(optimizer):
            optimizer.step()
            return
        self._has_scaled = True
        self.scaler.step(optimizer)

    def update(self) -> None:
        """Update the scale, after the last optimizer of a step."""
        if self.scaler is not None and self._has_scaled:
            self._unscaled.clear()
            self._has_scaled = False
            self.scaler.update()

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has gradients on any rank, if ranks skip together."""
        has = (p.grad is not None for group in optimizer.param_groups for p in group["params"])
        return self._is_together or any(has)

    def has_skipped_step(self) -> bool:
        """Whether a step was skipped since the last call: with a scaler, the scale has fallen.

        With a scaler, the first call only notes the scale.
        """
        skipped, self.has_skipped = self.has_skipped, False
        if self.scaler is None:
            return skipped
        last, self._last_scale = self._last_scale, self.scaler.get_scale()
        return skipped or (last is not None and self._last_scale < last)

    def state(self) -> dict[str, float]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, float]) -> None:
        """Load a state; a run of another precision starts with a new scaler."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            self._last_scale = self.scaler.get_scale()
