"""Iterate over a loader."""

import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..errors import UserError
from ..launch import signals
from . import loaders


def read(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield a loader's batches; its workers ignore Ctrl-C, so that the run can save first.

    Raises:
        UserError: A batch has no samples.
    """
    return _checked(_iterator(loader))


def _iterator(loader: Iterable[Any]) -> Iterator[Any]:
    if not getattr(loader, "num_workers", 0):
        return iter(loader)
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    with signals.block_sigint_in_children(context.get_start_method()):
        return iter(loader)


def _checked(batches: Iterator[Any]) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if loaders.is_empty(batch):
            raise UserError(
                f"batch {number} of the loader has no samples (its tensors' first dimension is 0): "
                "leave such batches out"
            )
        yield batch


def counted(batches: Iterator[Any], loader: Iterable[Any]) -> Iterator[Any]:
    """Yield all batches of a loader.

    Raises:
        UserError: A map-style dataset gives fewer than its loader's length: a StopIteration of the
            dataset ends a loader early.
    """
    number = 0
    for batch in batches:
        number += 1
        yield batch
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    if number < len(loader):
        raise UserError(
            f"the loader ended after {number} of {len(loader)} batches: its dataset raised "
            "StopIteration, or __len__ of its sampler is wrong"
        )
