"""Measure the children of ``sequential_module`` on a sample, to divide them by time or memory."""

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...data import randomness
from ...memory import activation_checkpointing, meta_device
from ...module import TrainingModule
from . import partition
from .boundary import Boundary
from .messages import Values, changeable

_REPEATS = 3
# A parameter, its gradient, and two states of an optimizer such as Adam.
_COPIES_OF_PARAMETERS = 4


@dataclass(frozen=True)
class Measured:
    """Of a child and a micro-batch: seconds of forward and backward, and bytes.

    ``saved``: what its forward keeps for its backward; ``inputs``: what it gets; ``parameters``:
    with gradients and the states of an optimizer.
    """

    seconds: float
    saved: int
    inputs: int
    parameters: int


def measure(
    module: TrainingModule,
    run_step: Callable[[], Any],
    autocast: Callable[[], contextlib.AbstractContextManager[None]],
    device: torch.device,
) -> list[Measured]:
    """Measure each child; the module and the random states are the same afterward.

    Args:
        module: The user's module, whole and on the CPU.
        run_step: Runs the user's step on a micro-batch on the CPU.
        autocast: Context of a forward.
        device: Where to measure.
    """
    meta_device.materialize(module, module)
    sequential: Any = getattr(module, partition.ATTRIBUTE)
    boundary = Boundary(module, torch.device("cpu"))
    found = []
    with randomness.Stream(0), activation_checkpointing.buffers_kept(module):
        try:
            with torch.no_grad():
                given = boundary.inputs(run_step, None)
        finally:
            boundary.close()
        seen: dict[int, Tensor] = {}
        for index in range(len(sequential)):
            part = copy.deepcopy(partition.part(sequential, range(index, index + 1))).to(device)
            measured, given = _measure(part, given, autocast, seen)
            found.append(measured)
    return found


def _measure(
    part: nn.Sequential,
    given: tuple[Any, ...],
    autocast: Callable[[], contextlib.AbstractContextManager[None]],
    seen: dict[int, Tensor],
) -> tuple[Measured, tuple[Any, ...]]:
    device = next((each.device for each in part.parameters()), torch.device("cpu"))
    # A tuple for a child is one argument of it, which torch's own class passes on as it is.
    nested = len(given) == 1 and isinstance(given[0], tuple)
    tensors = given[0] if nested else given
    inputs = tuple(_leaf(each, device) if isinstance(each, Tensor) else each for each in tensors)
    held = {each.data_ptr() for each in part.parameters()}
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in seen and pointer not in held:
            seen[pointer] = tensor.detach()
            saved += tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that saved itself would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        output = _forward(part, inputs, nested, autocast)
    seconds = min(_time(part, inputs, nested, autocast) for _ in range(_REPEATS))
    measured = Measured(
        seconds,
        saved,
        sum(each.nbytes for each in inputs if isinstance(each, Tensor)),
        _COPIES_OF_PARAMETERS * sum(each.nbytes for each in part.parameters()),
    )
    return measured, partition.arguments(part, Values.read(output, "a child"))


def _forward(
    part: nn.Sequential,
    inputs: tuple[Any, ...],
    nested: bool,
    autocast: Callable[[], contextlib.AbstractContextManager[None]],
) -> Any:
    own = tuple(changeable(each) if isinstance(each, Tensor) else each for each in inputs)
    with autocast():
        return part(own) if nested else part(*own)


def _time(
    part: nn.Sequential,
    inputs: tuple[Any, ...],
    nested: bool,
    autocast: Callable[[], contextlib.AbstractContextManager[None]],
) -> float:
    started = time.perf_counter()
    outputs = Values.read(_forward(part, inputs, nested, autocast), "a child").differentiable
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        if outputs[0].device.type != "cpu":
            torch.get_device_module(outputs[0].device).synchronize(outputs[0].device)
    return time.perf_counter() - started


def _leaf(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.is_floating_point())
