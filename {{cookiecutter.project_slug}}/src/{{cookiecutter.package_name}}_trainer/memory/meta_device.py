"""Build a model on the meta device, and materialize it one part at a time.

A parameter on torch's meta device has a shape but no data. A strategy materializes the part that
it is about to shard, so that no process ever holds the whole model.

Source: https://docs.pytorch.org/docs/stable/meta.html
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..checkpoint import fill
from ..data import randomness
from ..module import TrainingModule


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Create the parameters of modules on the meta device in this context.

    Buffers and other attributes are created as usual.
    """
    empty: Callable[..., Any] = _to_meta
    hook = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        hook.remove()


def _to_meta(module: nn.Module, name: str, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or parameter.is_meta:  # shared with another module: already converted
        return parameter
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


def materialize(
    owner: TrainingModule, part: nn.Module, has: Callable[[nn.Module], bool] = lambda _: True
) -> None:
    """Allocate and initialize, on the CPU, the meta parameters of layers in a part of a module.

    Each layer is initialized with random numbers from (seed, its name): the same in every process
    and with every strategy. A layer whose parameters all have values in ``trainer_state.weights``
    is not; those whose value is ``None`` there are overwritten by a checkpoint later.

    Raises:
        UserError: ``initialize`` of the whole module, the owner, does not handle a layer.
    """
    made: dict[int, nn.Parameter] = {}
    names = {id(each): name for name, each in owner.named_modules()}
    weights = owner.trainer_state.weights
    for layer in filter(has, part.modules()):
        if any(each.is_meta for each in layer.parameters(recurse=False)):
            _allocate(layer, made)
            name = names[id(layer)]
            own = dict(layer.named_parameters(name, recurse=False))
            if not own.keys() <= weights.keys():
                seed = randomness.mix(owner.trainer.seed, zlib.crc32(name.encode()))
                with randomness.Stream(seed):
                    owner.initialize(name, layer)
            for key, parameter in own.items():
                if (value := weights.get(key)) is not None:
                    fill(parameter.detach(), value)


def _allocate(layer: nn.Module, made: dict[int, nn.Parameter]) -> None:
    # One by one: to_empty would split a parameter that is used twice.
    for name, empty in layer._parameters.items():
        if empty is not None and empty.is_meta:
            if id(empty) not in made:
                memory = torch.empty_like(empty, device="cpu")
                made[id(empty)] = nn.Parameter(memory, requires_grad=empty.requires_grad)
            layer._parameters[name] = made[id(empty)]
