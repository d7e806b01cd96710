"""The shards of parameters in FairScale's layout, for callbacks that average them."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ...checkpoint import Stored, stored_tensors
from ..weights import LocalWeights
from .parameter_shards import Shard


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
        super().__init__(named, before_put=cut, is_spread=True)
        self._shards, self._keepers = shards, keepers

    def whole(self, name: str, part: Tensor) -> Tensor | None:
        key = id(self.parameters[name])
        return self._shards[key].gather(part, self._keepers[key])

    def read(self, name: str, value: Tensor | Stored) -> Tensor:
        parameter = self.parameters[name]
        whole: Tensor = stored_tensors.read_all(value)
        return torch.clone(self._shards[id(parameter)].cut(whole).to(parameter.device))
