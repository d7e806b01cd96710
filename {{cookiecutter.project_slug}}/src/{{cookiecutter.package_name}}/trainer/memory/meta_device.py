"""Models that are built without memory for their parameters, and get it a piece at a time.

A parameter on torch's meta device has a shape and no values. A strategy gives memory to the piece
that it is about to divide, so that no process ever holds the whole.

Source: https://docs.pytorch.org/docs/stable/meta.html
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..data import randomness
from ..module import TrainingModule


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Have the parameters of modules that are made within lie on the meta device.

    Buffers, and whatever else modules hold, are as they would be otherwise.
    """
    empty: Callable[..., Any] = _without_memory
    hook = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        hook.remove()


def _without_memory(module: nn.Module, name: str, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or parameter.is_meta:  # used in a second place: still the same
        return parameter
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def materialize(owner: TrainingModule, part: nn.Module) -> None:
    """Give memory, on the CPU, and values to all parameters in a part of a module without them.

    Each layer's values are drawn from (seed, its name): the same on every process and under every
    strategy.

    Args:
        owner: the whole, whose ``initialize`` draws the values.
        part: of it, or itself.

    Raises:
        UserError: ``initialize`` cannot tell what values a layer begins with.
    """
    made: dict[int, nn.Parameter] = {}
    names = {id(each): name for name, each in owner.named_modules()}
    for layer in part.modules():
        if any(each.is_meta for each in layer.parameters(recurse=False)):
            _give_memory(layer, made)
            name = names[id(layer)]
            seed = randomness.mix(owner.trainer.seed, zlib.crc32(name.encode()))
            with randomness.Stream(seed):
                owner.initialize(name, layer)


def _give_memory(layer: nn.Module, made: dict[int, nn.Parameter]) -> None:
    # One by one, for to_empty would make two of a parameter that is used twice.
    for name, empty in layer._parameters.items():
        if empty is not None and empty.is_meta:
            if id(empty) not in made:
                memory = torch.empty_like(empty, device="cpu")
                made[id(empty)] = nn.Parameter(memory, requires_grad=empty.requires_grad)
            layer._parameters[name] = made[id(empty)]
