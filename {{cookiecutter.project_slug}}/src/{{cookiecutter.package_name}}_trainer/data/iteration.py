"""Iterate over a loader; a StopIteration raised by user code is an error, not the loader's end."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from ..errors import UserError
from ..launch import signals
from . import loaders

# Where a DataLoader fetches a map-style batch, and where it re-raises a worker's error.
_MAKE = _MapDatasetFetcher.fetch.__code__
_RERAISE = ExceptionWrapper.reraise.__code__


def read(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield a loader's batches; its workers ignore Ctrl-C, so that the run can save first.

    Raises:
        UserError: The dataset raised StopIteration for a sample, or a batch has no samples.
    """
    return _checked(_started(loader))


def _started(loader: Iterable[Any]) -> Iterator[Any]:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        # StopIteration ends an iterable-style dataset, and in a worker one from collate_fn would.
        collate, loader.collate_fn = loader.collate_fn, _Collate(loader.collate_fn)
        try:
            return _iterator(loader)
        finally:
            loader.collate_fn = collate
    return _iterator(loader)


def _iterator(loader: Iterable[Any]) -> Iterator[Any]:
    if not getattr(loader, "num_workers", 0):
        return iter(loader)
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    with signals.block_sigint_in_children(context.get_start_method()):
        return iter(loader)


def _checked(batches: Iterator[Any]) -> Iterator[Any]:
    number = 0
    while True:
        try:
            batch = next(batches)
        except StopIteration as end:
            place = _place(end.__traceback__, str(end))
            if place is None:
                return
            raise UserError(
                f"the dataset raised StopIteration in batch {number} of the epoch, which would "
                f"end it early ({place}): raise IndexError or another error instead"
            ) from end
        if loaders.is_empty(batch):
            raise UserError(
                f"batch {number} of the loader has no samples (its tensors' first dimension is 0): "
                "leave such batches out"
            )
        yield batch
        number += 1


def _place(trace: TracebackType | None, text: str) -> str | None:
    """Where user code raised StopIteration; ``None`` if the loader itself ended."""
    frames = list(traceback.walk_tb(trace))
    codes = [frame.f_code for frame, _ in frames]
    if _RERAISE in codes:
        calls = [line.strip() for line in text.splitlines() if line.startswith('  File "')]
        return calls[-1] if calls else "in a worker"
    if _MAKE not in codes:
        return None
    frame, line = frames[-1]
    return f'File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}'


class _Collate:
    """Turns a StopIteration in ``collate_fn`` into an error. A class, so that it can be pickled."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        try:
            return self._collate(samples)
        except StopIteration as error:
            raise RuntimeError("collate_fn raised StopIteration") from error
