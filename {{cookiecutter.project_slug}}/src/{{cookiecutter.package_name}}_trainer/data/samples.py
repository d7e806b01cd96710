"""Count the samples of a batch, weight its loss by them, and split batches into samples.

A sample is an entry along the first dimension of tensors and arrays, or an item of a list as long
as the batch. All else belongs to every sample: tensors without dimensions, numbers, strings.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..errors import UserError, shown
from ..launch import collectives
from ..module import TrainingModule, hooks
from .moving import items_of, leaves, mapped
from .sampling import MicroBatch, Share

MOST_AHEAD = 8  # batches that ranks agree on at once, or one step, before the first is used
_Path = tuple[Any, ...]
_OVERRIDE = "override count_samples in the module, to say how many samples it has"
_LABELS = {"y", "label", "labels", "target", "targets"}


def batch_length(batch: Any, expected: int | None = None) -> int:
    """Number of samples in a batch; if lengths differ, the first one that is not 1.

    ``expected``: the number for which it was made, which tells whether a list is one of samples.
    """
    lengths = [len(leaf) for leaf in leaves(batch) if _has_length(leaf)]
    other = next((length for length in lengths if length != 1), expected or 1)
    return _common_length(batch, expected) or other


def _common_length(batch: Any, expected: int | None) -> int | None:
    """The number of samples that all in a batch agrees with; ``None``: there is none."""
    inner = [items for items in _lists(batch) if items is not batch]
    lengths = [len(leaf) for leaf in leaves(batch) if _has_length(leaf)]
    # A list of numbers or texts has one for each sample; one of tensors may have fields.
    sure = [len(item) for item in inner if item and isinstance(item[0], int | float | str)]
    # Fields are not counted: a list of equally long tensors has samples if others say so, too.
    outside = leaves(batch, lambda value: value is not batch and isinstance(value, list | tuple))
    others = [value for value in outside if _has_length(value) and type(value) not in (list, tuple)]
    of_samples = [*map(len, others), *(len(items) for items in inner if not _may_be_fields(items))]
    for number in dict.fromkeys([expected, *sure, *lengths[:1], *of_samples]):
        if number and _samples_in(batch, number) is not None:
            return number
    return None


def _may_be_fields(value: Any) -> bool:
    """Whether it is a list of equally long items, as fields such as ``[inputs, targets]`` are."""
    items = value if isinstance(value, list | tuple) else []
    sizes = {len(item) if _has_length(item) else 1 for item in items}
    return len(sizes) == 1 and sizes != {1}


def _lists(value: Any) -> list[Any]:
    """The lists and tuples in a value, before those in them; itself is one of them."""
    inner = [items for _, item in items_of(value) or [] for items in _lists(item)]
    return [value, *inner] if isinstance(value, list | tuple) else inner


class Counted(NamedTuple):
    """A batch, or the error raised while reading it, and its weight in means."""

    data: Any
    samples: int
    counted: float
    is_last: bool


class Counter:
    """Counts the batches of a loader: by the module's hooks, or by what is in them.

    A batch says it itself (``num_graphs``); or something in it is as long as the batch size, as it
    was in all full batches; or all in it has the same length; or labels, fewer than all else, do.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self._paths: frozenset[_Path] = frozenset()  # where full batches had an entry per sample

    def count(self, batch: Any, expected: int | None, *, is_last: bool = False) -> Counted:
        """Count a batch that was made for so many samples; 0: it is read to take part only."""
        if expected == 0:
            return Counted(batch, 0, 0.0, is_last)
        share = self._share
        if share.count_samples is None:
            samples = float(self._samples(batch, expected))
        else:
            samples = checked("count_samples", share.count_samples(batch))
        counted = samples
        if share.count_weight is not None:
            counted = checked("count_weight", share.count_weight(batch))
        return Counted(batch, int(samples), counted, is_last)

    def _samples(self, batch: Any, expected: int | None) -> int:
        """Number of samples by what is in a batch; UserError if it is ambiguous."""
        if counts := [count for count in map(_object_samples, leaves(batch)) if count is not None]:
            return counts[0]
        lengths = dict(_lengths(batch))
        if expected:
            full = {path for path, length in lengths.items() if length == expected}
            known = self._paths & lengths.keys() or full
            # What was as long as a batch, and is shorter now, tells that this one is smaller.
            sizes = {length for path in known if (length := lengths[path]) <= expected}
            if sizes == {expected} or len(sizes - {expected}) == 1:
                number = min(sizes)
                self._paths = frozenset(path for path in known if lengths[path] == number)
                return number
        if (common := _common_length(batch, expected)) is not None:
            if expected is None and _may_be_images(batch, common):
                what = "a list of tensors, which may be samples or fields"
                raise UserError(f"a batch has {what}: {_OVERRIDE}")
            return common
        if not any(lengths.values()):
            return 0 if lengths else expected or 1
        named = {length for path, length in lengths.items() if path and path[-1] in _LABELS}
        before = {lengths[path] for path in self._paths & lengths.keys()}
        fields = {length for path, length in lengths.items() if path and length > 1}
        fields = fields or {*lengths.values()}  # a list of texts
        shortest = min(lengths.values())  # a label for each sample, where other fields are flat
        for sizes in (named & {shortest}, before & {shortest}, fields):
            if len(sizes) == 1 and sizes != {0}:
                return sizes.pop()
        may_be_labels = type(batch) is tuple and getattr(batch[-1], "ndim", 1) == 1
        if may_be_labels and not _may_be_fields(batch[-1]):
            number, votes = lengths.get((-1,), 0), list(lengths.values())
            if number == shortest > 0 and votes.count(number) >= max(map(votes.count, votes)):
                self._paths = frozenset(path for path in lengths if lengths[path] == number)
                return number
        all_lengths = ", ".join(map(str, dict.fromkeys(lengths.values())))
        what = f"tensors and lists of different lengths ({all_lengths})"
        raise UserError(f"a batch has {what}: {_OVERRIDE}")


def _may_be_images(batch: Any, channels: int) -> bool:
    """Whether a list in a batch has tensors that look like images with so many channels."""
    return channels in (1, 3, 4) and any(
        len(items) not in (0, channels) and all(getattr(item, "ndim", 0) == 3 for item in items)
        for items in _lists(batch)
        if isinstance(items, list)
    )


def _object_samples(value: Any) -> int | None:
    """The number of samples of an object that knows it: graphs of PyG and DGL, packed sequences."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    numbers = (getattr(value, name, None) for name in ("num_graphs", "batch_size"))
    return next((number for number in numbers if type(number) is int), None)


def _lengths(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, int]]:
    items = items_of(value) or []
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    if is_list and type(value) is tuple and not path:  # of fields, and the last has labels
        items = [*items[:-1], *((-1, item) for _, item in items[-1:])]
    elif (is_list or not items) and _has_length(value):
        yield path, len(value)
        # The items of a list within a batch are samples, or fields that are equally long.
        are_equal = is_list and all(map(_has_length, value)) and len(set(map(len, value))) == 1
        items = items if are_equal or not path else []
    for key, item in items:
        yield from _lengths(item, (*path, key))


def checked(name: str, result: Any) -> float:
    try:
        number = float(result)
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if not 0 <= number < math.inf:
        raise UserError(f"{name} returned {shown(result)}: return a number from 0 on")
    return number


def endless(batches: Iterator[Counted]) -> Iterator[Counted]:
    """Yield all batches; then the last one, without samples, or the error of reading, for ever."""
    last = Counted(None, 0, 0.0, True)
    try:
        for last in batches:
            yield last
        yield from repeat(last._replace(samples=0, counted=0.0))
    except Exception as error:  # it is raised in its turn
        yield from repeat(Counted(error, 0, 0.0, False))


def weighed(
    batches: Iterator[Counted],
    accumulate: int,
    ranks: int,
    *,
    first: int = 0,
    start: int = 0,
    known: int | None = None,
    is_refused: bool = True,
) -> Iterator[MicroBatch]:
    """Yield micro-batches whose weights make each step the mean over all that it contains.

    The micro-batches of a step are read before its first is yielded, and ``ranks`` tell each other
    what these count: for one step, then for more, up to :data:`MOST_AHEAD` batches.

    ``batches``: of this replica, from number ``first`` on; those before ``start`` are skipped. With
    several micro-batches or ranks it must be :func:`endless`. ``known``: batches of this rank's
    loader. ``is_refused``: whether loaders must end together.
    """
    most = accumulate * max(1, MOST_AHEAD // accumulate) if ranks > 1 else accumulate
    ahead, index = deque(islice(batches, accumulate)), first
    while ahead:
        rows = _exchanged(ahead, ranks, known)
        for at, row in enumerate(rows):
            data, samples, counted, _ = ahead.popleft()
            if isinstance(data, Exception):
                raise data
            has_ended = _has_ended(row, index + 1, is_refused)
            if index >= start:
                step = rows[at - at % accumulate :][:accumulate]
                total = sum(rank[0] for of_ranks in step for rank in of_ranks)
                weight = counted * ranks / total if total else 0.0
                ends_step = has_ended or (index + 1) % accumulate == 0
                yield MicroBatch(data, index, samples, weight, ends_step, has_ended, counted)
            if has_ended:
                return
            index += 1
            ahead.extend(islice(batches, 2 if len(rows) < most else 1))


def _exchanged(ahead: "deque[Counted]", ranks: int, known: int | None) -> list[list[list[float]]]:
    """By batch and rank: what it counts, whether it is the last, and the loader's batches or -1."""
    local = [(batch.counted, batch.is_last, known or -1) for batch in ahead]
    if ranks == 1:
        return [[[*row]] for row in local]
    rows = torch.zeros(len(local), ranks, 3, dtype=torch.float64)
    rows[:, collectives.rank()] = torch.tensor(local, dtype=torch.float64)
    return list(collectives.all_reduce(rows).tolist())


def _has_ended(row: list[list[float]], count: int, is_refused: bool) -> bool:
    """Whether the loaders of all ranks have ended after so many batches."""
    ended = [bool(is_last) for _, is_last, _ in row]
    if is_refused and any(ended) and not all(ended):
        counts = [
            str(count) if is_last else f"{most:.0f}" if most > count else f"more than {count}"
            for _, is_last, most in row
        ]
        lines = (f"rank {rank} has {number}" for rank, number in enumerate(counts))
        numbers = f"{', '.join(lines)}; give each the same number, or set uneven_inputs='join'"
        raise UserError(f"the ranks' loaders give different numbers of batches: {numbers}")
    return all(ended)


def part_sizes(samples: int, count: int) -> list[int]:
    """Sizes of parts of a batch, which differ by at most one; the first ones are larger."""
    return [samples // count + (number < samples % count) for number in range(count)]


def counts_of(module: TrainingModule, pieces: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """What the pieces of a batch, of so many samples each, count in its mean."""
    if not hooks.is_overridden(module, TrainingModule, "count_weight"):
        return [*map(float, sizes)]
    return [float(module.count_weight(piece)) for piece in pieces]


class Splitter:
    """Splits the batches of a loader, of any nesting, by samples.

    An object with a method ``to``, such as a graph, is split by its own ``split(sizes)``.
    """

    _are_lists = False  # an earlier batch was a list of samples: a later one may look like fields

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Split a batch into parts with so many samples; UserError if it cannot be split."""
        if len(sizes) == 1:
            return [batch]
        is_of_samples = _samples_in(batch, sum(sizes), self._are_lists)
        if is_of_samples is None:
            raise UserError(_reason(batch, sum(sizes)))
        self._are_lists = is_of_samples(batch)

        def piece(number: int, end: int) -> Any:
            def cut(value: Any) -> Any:
                if _is_object(value):
                    return value.split(list(sizes))[number]
                return value[end - sizes[number] : end] if _has_length(value) else value

            return mapped(batch, cut, is_of_samples)

        return [piece(number, end) for number, end in enumerate(accumulate(sizes))]


def _samples_in(batch: Any, number: int, are_lists: bool = False) -> Callable[[Any], bool] | None:
    """Which lists of a batch have an item per sample; ``None`` if it has no such number of samples.

    A list at the top of a batch holds fields, unless only its items can be samples. So does a list
    of tensors as long as the batch, unless a list of other values shows that lists hold samples.
    """

    def is_list(value: Any) -> bool:
        is_plain = isinstance(value, list | tuple) and not hasattr(value, "_fields")
        if not is_plain or len(value) != number:
            return False
        # Samples are of one kind: tensors have one type and rank.
        kinds = {(getattr(item, "dtype", None), getattr(item, "ndim", None)) for item in value}
        return len(kinds) == 1

    def of_others(value: Any) -> bool:
        if value is batch:
            return is_list(value) and all(isinstance(item, str) for item in value)
        return is_list(value) and not any(map(_is_splittable, leaves(value)))

    ways: list[Callable[[Any], bool]] = [
        of_others,
        lambda value: value is not batch and is_list(value),
        lambda value: value is batch and is_list(value),
    ]
    for way in reversed(ways) if are_lists else ways:
        splittable = filter(_is_splittable, leaves(batch, way))
        if all(_has_length(leaf) and len(leaf) == number for leaf in splittable):
            return way
    return None


def _is_object(value: Any) -> bool:
    is_known = isinstance(value, Tensor | np.ndarray | list | type) or type(value) is tuple
    return not is_known and callable(getattr(value, "to", None))


def _is_splittable(value: Any) -> bool:
    is_array = isinstance(value, Tensor | np.ndarray) and value.ndim > 0
    return is_array or isinstance(value, list | tuple) or _is_object(value)


def _has_length(value: Any) -> bool:
    if isinstance(value, Tensor):  # a nested one has a length if it is jagged
        return value.ndim > 0 and not (value.is_nested and value.layout is torch.strided)
    has_methods = hasattr(value, "__len__") and callable(getattr(value, "split", None))
    return _is_splittable(value) and (has_methods or not _is_object(value))


def _reason(batch: Any, number: int) -> str:
    advice = "or use a strategy that does not split batches, such as 'ddp'"
    splittable = list(filter(_is_splittable, leaves(batch)))
    for leaf in splittable:
        if not _has_length(leaf):
            kind, how = type(leaf).__name__, "give it __len__ and split(sizes), like torch.Tensor's"
            return f"a batch is split by samples, and {kind} cannot be: {how}, {advice}"
    other = next(leaf for leaf in splittable if len(leaf) != number)
    shapes = [tuple(getattr(leaf, "shape", [len(leaf)])) for leaf in (splittable[0], other)]
    return (
        f"a batch of {number} samples is split, and has tensors of shapes {shapes[0]} and "
        f"{shapes[1]}: give each one entry per sample, keep others, such as weights of classes, in "
        f"buffers of the module, {advice}"
    )
