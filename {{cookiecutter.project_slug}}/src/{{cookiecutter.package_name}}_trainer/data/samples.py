"""The samples of a batch: their number, and batches split by them.

A sample is an entry along the first dimension of tensors and arrays, or an item of a list as long
as the batch. All else belongs to every sample: tensors without dimensions, numbers, strings.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import UserError
from .moving import leaves, mapped


def batch_length(batch: Any, expected: int | None = None) -> int:
    """Number of samples in a batch.

    If its tensors have different lengths, the first one that is not 1; 1 without tensors.
    ``expected``: the number for which it was made, which tells whether a list is one of samples.
    """
    lengths = [len(each) for each in leaves(batch) if _has_length(each)]
    inner: list[int] = []

    def note(value: Any) -> bool:
        if isinstance(value, list | tuple) and value is not batch:
            inner.append(len(value))
        return False

    leaves(batch, note)
    for number in dict.fromkeys([expected, *lengths[:1], *inner]):
        if number and _samples_in(batch, number) is not None:
            return number
    return next((each for each in lengths if each != 1), expected or 1)


def part_sizes(samples: int, count: int) -> list[int]:
    """Sizes of parts of a batch, which differ by at most one; the first ones are larger."""
    return [samples // count + (number < samples % count) for number in range(count)]


class Splitter:
    """Splits the batches of a loader, of any nesting, by samples.

    An object with a method ``to``, such as a graph, is split by its own ``split(sizes)``.
    """

    _are_lists = False
    """Whether an earlier batch was a list of samples: a later one may look like one of fields."""

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Split a batch into parts with so many samples; UserError if it cannot be split."""
        if len(sizes) == 1:
            return [batch]
        is_of_samples = _samples_in(batch, sum(sizes), self._are_lists)
        if is_of_samples is None:
            raise UserError(_reason(batch, sum(sizes)))
        self._are_lists = is_of_samples(batch)

        def part(number: int, end: int) -> Any:
            def cut(value: Any) -> Any:
                if _is_object(value):
                    return value.split(list(sizes))[number]
                return value[end - sizes[number] : end] if _has_length(value) else value

            return mapped(batch, cut, is_of_samples)

        return [part(number, end) for number, end in enumerate(accumulate(sizes))]


def _samples_in(batch: Any, number: int, are_lists: bool = False) -> Callable[[Any], bool] | None:
    """Which lists of a batch have an item per sample; ``None`` if it has no such number of samples.

    Items of the batch itself are fields if that is possible. So are tensors in a list that are as
    long as the batch, unless a list of others tells that lists are of samples.
    """

    def is_list(value: Any) -> bool:
        is_plain = isinstance(value, list | tuple) and not hasattr(value, "_fields")
        if not is_plain or len(value) != number:
            return False
        # Samples are of one kind: tensors have one type and rank.
        kinds = {(getattr(each, "dtype", None), getattr(each, "ndim", None)) for each in value}
        return len(kinds) == 1

    def of_others(value: Any) -> bool:
        if value is batch:
            return is_list(value) and all(isinstance(each, str) for each in value)
        return is_list(value) and not any(map(_is_splittable, leaves(value)))

    ways: list[Callable[[Any], bool]] = [
        of_others,
        lambda value: value is not batch and is_list(value),
        lambda value: value is batch and is_list(value),
    ]
    for way in reversed(ways) if are_lists else ways:
        found = filter(_is_splittable, leaves(batch, way))
        if all(_has_length(each) and len(each) == number for each in found):
            return way
    return None


def _is_object(value: Any) -> bool:
    is_known = isinstance(value, Tensor | np.ndarray | list | type) or type(value) is tuple
    return not is_known and callable(getattr(value, "to", None))


def _is_splittable(value: Any) -> bool:
    """Whether a leaf has entries for samples."""
    is_array = isinstance(value, Tensor | np.ndarray) and value.ndim > 0
    return is_array or isinstance(value, list | tuple) or _is_object(value)


def _has_length(value: Any) -> bool:
    has_methods = hasattr(value, "__len__") and callable(getattr(value, "split", None))
    return _is_splittable(value) and (has_methods or not _is_object(value))


def _reason(batch: Any, number: int) -> str:
    advice = "or use a strategy that does not split batches, such as 'ddp'"
    found = list(filter(_is_splittable, leaves(batch)))
    for each in found:
        if not _has_length(each):
            return (
                f"a batch is split by samples, and {type(each).__name__} cannot be: give it "
                f"__len__ and split(sizes), like torch.Tensor's, {advice}"
            )
    other = next(each for each in found if len(each) != number)
    shapes = [tuple(getattr(each, "shape", [len(each)])) for each in (found[0], other)]
    return (
        f"a batch of {number} samples is split, and has tensors of shapes {shapes[0]} and "
        f"{shapes[1]}: give each one entry per sample, keep others, such as weights of classes, in "
        f"buffers of the module, {advice}"
    )
