"""Split a batch into parts: for replicas of a model, or for the micro-batches of a pipeline."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..data import moving


def split(value: Any, count: int) -> list[Any]:
    """Split a batch of any nesting into parts.

    Tensors are split along the first dimension into parts whose sizes differ by at most one. Other
    objects are in every part.

    Args:
        value: The batch.
        count: Number of parts.
    """
    if isinstance(value, Tensor) and value.ndim > 0:
        return list(value.tensor_split(count))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [type(value)(*parts) for parts in _split_each(value, count)]
    if isinstance(value, list | tuple):
        return [type(value)(parts) for parts in _split_each(value, count)]
    if isinstance(value, Mapping):
        cuts = _split_each(list(value.values()), count)
        return [type(value)(zip(value, parts, strict=True)) for parts in cuts]  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        cuts = _split_each([getattr(value, name) for name in names], count)
        return [moving.with_fields(value, dict(zip(names, parts, strict=True))) for parts in cuts]
    return [value] * count


def _split_each(values: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    return list(zip(*(split(value, count) for value in values), strict=True)) or [()] * count
