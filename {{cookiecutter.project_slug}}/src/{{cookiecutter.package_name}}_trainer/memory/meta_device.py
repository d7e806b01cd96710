"""Build a model on the meta device, and materialize it one part at a time.

A parameter on torch's meta device has a shape but no data. A strategy materializes the part that
it is about to shard, so that no process ever holds the whole model.

Source: https://docs.pytorch.org/docs/stable/meta.html
"""

import contextlib
import zlib
from collections import Counter
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
    """Create the parameters of modules, and nothing else, on the meta device in this context."""
    empty: Callable[..., Any] = _to_meta
    with register_module_parameter_registration_hook(empty):
        yield


def _to_meta(module: nn.Module, name: str, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or parameter.is_meta:  # shared with another module: already converted
        return parameter
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


class Initializer:
    """Allocates and initializes the meta parameters of a module, each layer on one of its ranks.

    A layer is initialized with random numbers from (seed, its name), the same with every strategy.
    So each rank initializes its share of the layers before the first one is needed; the caller
    broadcasts them to ``device``. With one of ``ranks``, a layer is initialized when it is
    materialized.
    """

    def __init__(
        self, module: TrainingModule, rank: int = 0, ranks: int = 1, device: Any = "cpu"
    ) -> None:
        self._module, self._device = module, device if ranks > 1 else "cpu"
        self._names = {layer: name for name, layer in module.named_modules()}
        self._sources = _sources(module, ranks)
        self._ahead: dict[int, nn.Parameter] = {}
        self._on_demand = ranks == 1
        if not self._on_demand:
            for layer in [layer for layer, source in self._sources.items() if source == rank]:
                empty = dict(layer._parameters)
                _allocate(layer, self._ahead, {}, "cpu")
                self._initialize(layer)
                layer._parameters.update(empty)

    def materialize(
        self, module: nn.Module, has: Callable[[nn.Module], bool] = lambda _: True
    ) -> dict[int, int]:
        """Allocate the meta parameters of layers in a part of the module.

        Those with values are on the CPU, others on the device. Return, by the id of a new
        parameter, the rank that has its values.
        """
        made: dict[int, nn.Parameter] = {}
        sources: dict[int, int] = {}
        for layer in filter(has, module.modules()):
            if any(parameter.is_meta for parameter in layer.parameters(recurse=False)):
                _allocate(layer, made, self._ahead, self._device)
                if self._on_demand:
                    self._initialize(layer)
                sources |= {id(p): self._sources[layer] for p in layer.parameters(recurse=False)}
        return sources

    def _initialize(self, layer: nn.Module) -> None:
        """Set values; those that are ``None`` in ``weights`` are overwritten by a checkpoint."""
        weights = self._module.trainer_state.weights
        name = self._names[layer]
        parameters = dict(layer.named_parameters(name, recurse=False))
        if not parameters.keys() <= weights.keys():
            seed = randomness.mix(self._module.trainer.seed, zlib.crc32(name.encode()))
            with randomness.Stream(seed):
                self._module.initialize(name, layer)
        for key, parameter in parameters.items():
            if (value := weights.get(key)) is not None:
                fill(parameter.detach(), value)


def _sources(module: nn.Module, ranks: int) -> dict[nn.Module, int]:
    """The rank that initializes each layer: that with the fewest parameters so far.

    Layers that share a parameter overwrite it in their order: one rank initializes all of these.
    """
    uses = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    sources: dict[nn.Module, int] = {}
    load = [0] * ranks
    for layer in module.modules():
        if empty := [p for p in layer.parameters(recurse=False) if p.is_meta]:
            is_shared = any(uses[id(parameter)] > 1 for parameter in empty)
            sources[layer] = 0 if is_shared else load.index(min(load))
            load[sources[layer]] += sum(parameter.numel() for parameter in empty)
    return sources


def _allocate(
    layer: nn.Module, made: dict[int, nn.Parameter], ahead: dict[int, nn.Parameter], device: Any
) -> None:
    for name, empty in layer._parameters.items():  # to_empty would split one that is used twice
        if empty is not None and empty.is_meta:
            key = id(empty)
            if key in ahead:
                made[key] = ahead.pop(key)
            elif key not in made:
                memory = torch.empty_like(empty, device=device)
                made[key] = nn.Parameter(memory, requires_grad=empty.requires_grad)
            layer._parameters[name] = made[key]
