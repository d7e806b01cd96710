"""Number formats of a run: of autocast and of parameters, and the scaler of fp16 gradients."""

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import other_trainers
from ..checkpoint.dtensors import is_sharded
from ..errors import ConfigurationError

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_PARAMETERS = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
NAMES = ("32-true", *_AUTOCAST, *_PARAMETERS)
# Set by torch on optimizers that are fused: its gradient scaler leaves it to them to unscale.
_UNSCALES_ITSELF = "_step_supports_amp_scaling"


class _Scaler(torch.amp.GradScaler):
    """Unscales sharded gradients beside whole ones; torch's takes either, and not both at once.

    Gradients that are offloaded lie on the CPU, and the scale on the GPU.
    """

    def step(self, optimizer: Optimizer, *arguments: Any, **options: Any) -> float | None:
        unscales_itself = getattr(optimizer, _UNSCALES_ITSELF, None)
        if unscales_itself is None or self._device == "cpu" or not _any_on_cpu(optimizer):
            return super().step(optimizer, *arguments, **options)
        # A fused optimizer would read the overflow's copy before it has arrived.
        setattr(optimizer, _UNSCALES_ITSELF, False)
        try:
            return super().step(optimizer, *arguments, **options)
        finally:
            setattr(optimizer, _UNSCALES_ITSELF, unscales_itself)

    def _unscale_grads_(self, optimizer: Optimizer, *arguments: Any) -> dict[torch.device, Tensor]:
        groups = optimizer.param_groups
        parameters = [each for group in groups for each in group["params"] if each.grad is not None]
        if _any_on_cpu(optimizer):
            # torch would copy the scale to the CPU without waiting, and read it at once.
            scale, overflow, *rest = arguments
            arguments = (scale.cpu(), overflow.cpu(), *rest)
        divided = [each for each in parameters if is_sharded(each)]
        whole = [each for each in parameters if not is_sharded(each)]
        if not divided or not whole:
            return super()._unscale_grads_(optimizer, *arguments)
        with _without_gradients(whole):
            overflows = super()._unscale_grads_(optimizer, *arguments)
        with _without_gradients(divided):
            others = super()._unscale_grads_(optimizer, *arguments)
        for device, overflow in others.items():
            overflows[device] = torch.maximum(overflow, overflows.get(device, overflow))
        return overflows


def _any_on_cpu(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(each.device.type == "cpu" for group in groups for each in group["params"])


@contextlib.contextmanager
def _without_gradients(parameters: list[Tensor]) -> Iterator[None]:
    gradients = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    try:
        yield
    finally:
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient


class Precision:
    """Autocast and gradient scaling of a run, and the format of its parameters.

    ``dtype``: that autocast computes in; ``None``: no autocast. ``parameter_dtype``: of parameters,
    buffers, batches and so of all that is computed; ``None``: as the user made them.

    Args:
        name: ``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"``: autocast over float32 parameters;
            ``"bf16-true"`` or ``"16-true"``: everything in half, without autocast. There is no
            scaler: in ``"16-true"`` what is below 6e-8 is lost (Adam's ``eps`` of 1e-8 too: give
            1e-4), and what is above 65504 infinite.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigurationError: the name is unknown.

    Source: https://docs.pytorch.org/docs/stable/amp.html
    """

    def __init__(self, name: str, device_type: str) -> None:
        if name not in NAMES:
            raise ConfigurationError(other_trainers.unknown("precision", name, NAMES))
        self.name = name
        self.device_type = device_type
        self.dtype = _AUTOCAST.get(name)
        self.parameter_dtype = _PARAMETERS.get(name)
        self.scaler: torch.amp.GradScaler | None = None
        if name == "16-mixed":
            self.scaler = _Scaler(device_type)

    def cast(self, module: nn.Module) -> None:
        """Bring a module's floating-point parameters and buffers into their format, in place."""
        # Not by the module's `to`, which would make complex buffers real, and cast the sums of
        # torchmetrics too.
        self.cast_all((*module.parameters(), *module.buffers()))

    def cast_all(self, tensors: Iterable[Tensor]) -> None:
        """Bring floating-point parameters and buffers into their format, in place."""
        if self.parameter_dtype is None:
            return
        for each in tensors:
            if each.is_floating_point() and each.dtype != self.parameter_dtype:
                each.data = each.data.to(self.parameter_dtype)

    def autocast(self) -> AbstractContextManager[None]:
        """What a forward pass runs in; without a half format there is no need to."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call ``backward`` on."""
        # A scaled loss overflows in half precision, which torch's sharded scaler would leave it in.
        return loss if self.scaler is None else self.scaler.scale(loss.float())

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Bring gradients back to their size, once, before they are clipped."""
        if self.scaler is not None:
            for optimizer in optimizers:
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
