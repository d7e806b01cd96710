"""Sharded parameters in FairScale's layout.

A tensor of n elements is flattened, padded with zeros to a multiple of the number of processes,
and split into equal slices.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoint import Stored, flat_part, read_all
from ...errors import ConfigurationError
from ...launch import collectives
from ...module import TrainingModule
from ..weights import LocalWeights


class Shard:
    """This process' shard of a parameter, and of tensors with the same shape.

    Args:
        parameter: The full parameter.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.shape = parameter.shape
        self._size = math.ceil(parameter.numel() / collectives.world_size())

    def cut(self, whole: Tensor | Stored) -> Tensor:
        """This process' shard of a tensor of the parameter's shape; only it is read.

        Raises:
            ValueError: It has another shape.
        """
        if whole.shape != self.shape:
            raise ValueError(f"shape {tuple(whole.shape)} where {tuple(self.shape)} belongs")
        if collectives.world_size() == 1:
            return whole.read() if isinstance(whole, Stored) else whole
        count = self.shape.numel()
        start = min(collectives.rank() * self._size, count)
        own = flat_part(whole, start, min(self._size, count - start))
        return torch.nn.functional.pad(own, (0, self._size - own.numel()))

    def gather(self, own: Tensor, keeper: int) -> Tensor | None:
        """Gather the full tensor on one process' CPU; ``None`` on the others."""
        if collectives.world_size() == 1:
            return own.detach().cpu()
        if collectives.rank() != keeper:
            dist.gather(own.detach(), dst=keeper)
            return None
        padded = own.new_empty((collectives.world_size(), self._size), requires_grad=False)
        dist.gather(own.detach(), list(padded), dst=keeper)
        return padded.view(-1)[: self.shape.numel()].view(self.shape).cpu()

    def make_whole(self) -> None:
        """Restore the full parameter on every process."""
        if collectives.world_size() > 1:
            padded = torch.cat(collectives.all_gather(self.parameter.data))
            self.parameter.data = padded[: self.shape.numel()].view(self.shape)

    def gather_values(self, values: Mapping[str, Any], keeper: int) -> dict[str, Any] | None:
        """Gather the parameter's optimizer state on one process; ``None`` on the others."""
        whole = dict(values)
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == self.parameter.shape:
                whole[key] = self.gather(value, keeper)
        return whole if collectives.rank() == keeper else None

    def cut_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """This process' shard of the parameter's optimizer state, read."""
        part = {}
        for key, value in values.items():
            # Like torch, which keeps the step count of a parameter in a tensor without dimensions.
            is_tensor = isinstance(value, Tensor | Stored) and key != "step"
            whole = is_tensor and value.shape == self.shape
            part[key] = self.cut(value) if whole else read_all(value)
        return part


class Contents:
    """The entries of a module in a checkpoint, by name; created before its parameters are sharded.

    Args:
        module: The user's module.

    Raises:
        ConfigurationError: It has extra state that is not a tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            path, _, last = name.rpartition(".")
            if isinstance(value, nn.Parameter):
                self.parameters[name] = value
            elif isinstance(value, Tensor):
                self._owners[name] = module.get_submodule(path), last
            else:
                raise ConfigurationError(
                    f"{name}: extra state of a module cannot be saved if parameters are sharded; "
                    "keep it in a buffer, or use strategy='ddp_sharded'"
                )

    def buffers(self) -> dict[str, Tensor]:
        """The current buffers."""
        return {name: getattr(owner, last) for name, (owner, last) in self._owners.items()}

    def check(self, names: Collection[str]) -> None:
        """Check the names of another state dict.

        Raises:
            KeyError: Names are missing or unexpected.
        """
        strange = sorted((self.parameters.keys() | self._owners.keys()) ^ set(names))
        if strange:
            raise KeyError(f"one of the two alone has {', '.join(strange[:3])}")


def leave_cut(module: TrainingModule, shards: Iterable[Shard]) -> None:
    """Record that a module's parameters are sharded from now on, also after the run."""
    module.trainer_state = replace(module.trainer_state, shards=list(shards))


def make_whole(module: TrainingModule) -> None:
    """Gather the shards that an earlier run has left in a module; called by every process."""
    for shard in module.trainer_state.shards:
        shard.make_whole()
    module.trainer_state = replace(module.trainer_state, shards=())


class ShardedWeights(LocalWeights):
    """This process' shards of the parameters.

    Args:
        named: Names and parameters.
        shards: Shard of each parameter, by its ``id``.
        keepers: The process that keeps each gathered parameter.
        cut: Frees all gathered parameters.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        shards: Mapping[int, Shard],
        keepers: Mapping[int, int],
        cut: Callable[[], None],
    ) -> None:
        super().__init__(named, before_put=cut, is_sharded=True)
        self._shards, self._keepers = shards, keepers

    def whole(self, name: str, shard: Tensor) -> Tensor | None:
        key = id(self.parameters[name])
        return self._shards[key].gather(shard, self._keepers[key])

    def read(self, name: str, value: Tensor | Stored) -> Tensor:
        parameter = self.parameters[name]
        return torch.clone(self._shards[id(parameter)].cut(value).to(parameter.device))
