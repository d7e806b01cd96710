"""The samples of a batch: their number, and batches split by them.

A sample is an entry along the first dimension of tensors and arrays, or an item of a list as long
as the batch. All else belongs to every sample: tensors without dimensions, numbers, strings.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..errors import UserError
from ..module import TrainingModule, is_overridden
from .moving import leaves, mapped

_Path = tuple[Any, ...]
_LABELS = {"y", "label", "labels", "target", "targets"}


def batch_length(batch: Any, expected: int | None = None) -> int:
    """Number of samples in a batch; if lengths differ, the first one that is not 1.

    ``expected``: the number for which it was made, which tells whether a list is one of samples.
    """
    lengths = [len(each) for each in leaves(batch) if _has_length(each)]
    other = next((each for each in lengths if each != 1), expected or 1)
    return _common_length(batch, expected) or other


def _common_length(batch: Any, expected: int | None) -> int | None:
    """The number of samples that all in a batch agrees with; ``None``: there is none."""
    inner: list[list[Any] | tuple[Any, ...]] = []

    def note(value: Any) -> bool:
        if isinstance(value, list | tuple) and value is not batch:
            inner.append(value)
        return False

    lengths = [len(each) for each in leaves(batch, note) if _has_length(each)]
    # A list of numbers or texts has one for each sample; one of tensors may have fields.
    sure = [len(each) for each in inner if each and isinstance(each[0], int | float | str)]
    for number in dict.fromkeys([expected, *sure, *lengths[:1], *map(len, inner)]):
        if number and _samples_in(batch, number) is not None:
            return number
    return None


class SampleCounter:
    """Counts the samples of a loader's batches by what is in them.

    A batch says it itself (``num_graphs``); or something in it is as long as the batch size, as it
    was in all full batches; or all in it has the same length; or its labels say it.
    """

    _paths: frozenset[_Path] = frozenset()
    """Where full batches had as many entries as samples."""

    def count(self, batch: Any, expected: int | None) -> int:
        """Number of samples in a batch that was made for so many; UserError if it is ambiguous."""
        if own := [each for each in map(_own_number, leaves(batch)) if each is not None]:
            return own[0]
        lengths = dict(_lengths(batch))
        if expected:
            full = {path for path, each in lengths.items() if each == expected}
            known = self._paths & lengths.keys() or full
            # What was as long as a batch, and is shorter now, tells that this one is smaller.
            found = {each for path in known if (each := lengths[path]) <= expected}
            smaller = found - {expected}
            if len(smaller) == 1 or found == {expected}:
                number = min(found)
                self._paths = frozenset(path for path in known if lengths[path] == number)
                return number
        if (common := _common_length(batch, expected)) is not None:
            return common
        named = {each for path, each in lengths.items() if path and path[-1] in _LABELS}
        fields = {each for path, each in lengths.items() if path and each != 1}
        for found in (named, fields):
            if len(found) == 1:
                return found.pop()
        if not lengths:
            return expected or 1
        if type(batch) is tuple and (-1,) in lengths:
            return lengths[-1,]
        shown = ", ".join(map(str, dict.fromkeys(lengths.values())))
        raise UserError(
            f"a batch has tensors and lists of different lengths ({shown}): override count_samples "
            "in the module, to say how many samples it has"
        )


def _own_number(value: Any) -> int | None:
    """The number of samples of an object that knows it: graphs of PyG and DGL, packed sequences."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    numbers = (getattr(value, name, None) for name in ("num_graphs", "batch_size"))
    return next((each for each in numbers if type(each) is int), None)


def _lengths(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, int]]:
    """Where in a batch tensors, arrays and lists are, and their lengths."""
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif hasattr(value, "_fields"):
        items = list(value._asdict().items())
    elif dataclasses.is_dataclass(value) and not _is_object(value):
        items = list(vars(value).items())
    elif _has_length(value):
        is_fields = type(value) is tuple and not path
        if not is_fields:
            yield path, len(value)
        # The items of a list within a batch are samples, or fields that are equally long.
        if isinstance(value, list | tuple) and (
            not path or (all(map(_has_length, value)) and len(set(map(len, value))) == 1)
        ):
            last = len(value) - 1 if is_fields else None  # of a tuple of fields the last: labels
            items = [(-1 if key == last else key, each) for key, each in enumerate(value)]
    for key, each in items:
        yield from _lengths(each, (*path, key))


def part_sizes(samples: int, count: int) -> list[int]:
    """Sizes of parts of a batch, which differ by at most one; the first ones are larger."""
    return [samples // count + (number < samples % count) for number in range(count)]


def counts_of(module: TrainingModule, pieces: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """What the pieces of a batch, of so many samples each, count in its mean."""
    if not is_overridden(module, TrainingModule, "count_weight"):
        return [*map(float, sizes)]
    counts = [float(module.count_weight(piece)) for piece in pieces]
    return counts if any(counts) else [*map(float, sizes)]


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
