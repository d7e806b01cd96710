"""The shards of the parameters that this process holds, for callbacks that average them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import ShardedDict, Stored, dtensors, fill


class LocalWeights:
    """Parameters by name, as far as this process holds them; methods as in ``module.Weights``.

    ``named``: full parameters, or DTensors; of several names of one, the first counts.
    ``before_put`` frees what was gathered from parameters, before they are overwritten.
    ``is_sharded``: whether other processes hold other parameters.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        before_put: Callable[[], None] | None = None,
        is_sharded: bool = False,
    ) -> None:
        self.parameters: dict[str, Tensor] = {}
        self._names: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        for name, parameter in named:
            key = first.setdefault(id(parameter), name)
            self.parameters[key] = parameter
            self._names.setdefault(key, []).append(name)
        self._before_put, self._is_sharded = before_put, is_sharded

    def trained(self) -> list[str]:
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    @torch.no_grad()
    def shards(self, names: Iterable[str]) -> list[Tensor]:
        return [dtensors.local(self.parameters[name]) for name in names]

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        if self._before_put is not None:
            self._before_put()
        if values:  # torch refuses empty lists
            torch._foreach_copy_(self.shards(values), list(values.values()))

    def state(self, shards: Mapping[str, Tensor]) -> dict[str, Any]:
        tensors = {key: self._whole(key, shard) for key, shard in shards.items()}
        kept = {name: tensor for key, tensor in tensors.items() for name in self._names[key]}
        return ShardedDict(kept) if self._is_sharded else kept

    def _whole(self, name: str, shard: Tensor) -> Tensor:
        like: Any = self.parameters[name]
        if not dtensors.is_sharded(like):
            return shard
        mesh, sizes = like.device_mesh, {"shape": like.shape, "stride": like.stride()}
        if shard.device.type == mesh.device_type:
            tensor: Tensor = like.from_local(shard, mesh, like.placements, run_check=False, **sizes)
            return tensor
        # Offloaded shards: from_local would move them to the device of the mesh.
        copy = torch.empty_like(like, dtype=shard.dtype, requires_grad=False)
        dtensors.local(copy).copy_(shard)
        return copy

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: self._read(name, saved[name]) for name in self.parameters if name in saved}

    def _read(self, name: str, value: Tensor | Stored) -> Tensor:
        like = torch.empty_like(self.parameters[name], dtype=value.dtype, requires_grad=False)
        fill(like, value)
        return dtensors.local(like)
