"""The slices of stage 3's parameters, for callbacks that average them."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import Stored, stored_tensors
from ..weights import LocalWeights
from .slices import ParameterSlices, Slice
from .state import gather


class SlicedWeights(LocalWeights):
    """This process' slices of the parameters.

    Args:
        named: Names and parameters.
        slices: Locates them.
        zero: DeepSpeed's optimizer.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], slices: ParameterSlices, zero: Any
    ) -> None:
        super().__init__(named, is_spread=True)
        self._slices, self._zero = slices, zero
        self._order = {name: index for index, name in enumerate(self.parameters)}

    @torch.no_grad()
    def parts(self, names: Iterable[str]) -> list[Tensor]:
        found = (self._slices.weights(self.parameters[name]) for name in names)
        return [each.within(each.flat) for each in found]

    def put(self, parts: Mapping[str, Tensor]) -> None:
        # What DeepSpeed calls around loading: it frees gathered parameters, and gathers small ones,
        # which it keeps in full, again.
        self._zero.checkpoint_event_prologue()
        super().put(parts)
        self._zero.checkpoint_event_epilogue()

    def whole(self, name: str, part: Tensor) -> Tensor | None:
        parameter = self.parameters[name]
        own = self._slices.weights(parameter)
        place = Slice(part, 0, own.offset, own.length)
        return gather(self._order[name], place, part, self._slices.shape(parameter))

    def read(self, name: str, value: Tensor | Stored) -> Tensor:
        own = self._slices.weights(self.parameters[name])
        whole: Tensor = stored_tensors.read_all(value)
        return own.cut(whole).to(own.flat.device, copy=True)
