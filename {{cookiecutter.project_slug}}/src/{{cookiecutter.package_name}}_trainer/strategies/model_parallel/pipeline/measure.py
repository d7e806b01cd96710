"""Measure the children of ``sequential_module`` on a sample, to divide them by time or memory."""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ....data import randomness
from ....memory import activation_checkpointing, meta_device
from ....module import TrainingModule
from . import partition
from .activations import alias
from .boundary import Boundary, Step

Context = Callable[[], AbstractContextManager[None]]
_REPEATS = 3
# A parameter, its gradient, and two states of an optimizer such as Adam.
_COPIES_OF_PARAMETERS = 4


@dataclass(frozen=True)
class Measured:
    """Of a child and a micro-batch: seconds of forward and backward, and bytes."""

    seconds: float
    saved: int
    """What its forward keeps for its backward."""
    inputs: int
    parameters: int
    """With gradients and the states of an optimizer."""


def measure(
    module: TrainingModule, run_step: Callable[[], Any], autocast: Context, device: torch.device
) -> list[Measured]:
    """Measure each child on a device, with a step that runs on the CPU, as the module does."""
    state = module.trainer_state
    # Those of a checkpoint come later, and steps need numbers.
    weights = {name: each for name, each in state.weights.items() if each is not None}
    module.trainer_state = replace(state, weights=weights)
    meta_device.Initializer(module).materialize(module)
    sequential: Any = getattr(module, partition.ATTRIBUTE)
    boundary = Boundary(module, torch.device("cpu"))
    found, seen = [], dict[int, Tensor]()
    with randomness.Stream(0), activation_checkpointing.buffers_kept(module):
        try:
            with torch.no_grad():
                given = boundary.inputs(Step(run_step))
        finally:
            boundary.close()
        for index in range(len(sequential)):
            part = copy.deepcopy(partition.part(sequential, range(index, index + 1))).to(device)
            inputs = tree_map_only(
                Tensor, lambda x: x.detach().to(device).requires_grad_(x.is_floating_point()), given
            )
            measured, output = _measure(part, inputs, seen, autocast)
            found.append(measured)
            given = partition.arguments(part, output)
    return found


def _measure(
    part: nn.Sequential, inputs: tuple[Any, ...], seen: dict[int, Tensor], autocast: Context
) -> tuple[Measured, Any]:
    """Measure a child; ``seen``: what earlier children have saved, by its address."""

    def run() -> Any:
        with autocast():
            return part(*tree_map_only(Tensor, alias, inputs))

    def pack(tensor: Tensor) -> Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # an output that saved itself would never be freed

    def seconds() -> float:
        started = time.perf_counter()
        outputs = [x for x in tree_leaves(run()) if isinstance(x, Tensor) and x.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
            if outputs[0].device.type != "cpu":
                torch.get_device_module(outputs[0].device).synchronize()
        return time.perf_counter() - started

    known = {*seen, *(each.untyped_storage().data_ptr() for each in part.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        output = run()
    saved = [each for pointer, each in seen.items() if pointer not in known]
    measured = Measured(
        min(seconds() for _ in range(_REPEATS)),
        sum(each.untyped_storage().nbytes() for each in saved),
        sum(each.nbytes for each in tree_leaves(inputs) if isinstance(each, Tensor)),
        _COPIES_OF_PARAMETERS * sum(each.nbytes for each in part.parameters()),
    )
    return measured, output
