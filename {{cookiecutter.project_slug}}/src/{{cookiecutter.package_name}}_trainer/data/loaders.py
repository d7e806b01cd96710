"""Check loaders: a loader is an iterable of batches, such as a DataLoader.

For evaluation there may be several, in a dict by name.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import UserError, shown

_MOST_WORKERS = 64
"""For each core. Workers that wait for a network may be many more than cores."""


def by_name(loader: Any, source: str) -> dict[str, Any]:
    """Check the loaders of an evaluation, and return them by name.

    Args:
        loader: A loader, which gets the name ``""``; or a dict of loaders by name.
        source: As in :func:`check`.

    Raises:
        UserError: It is something else.
    """
    if _is_several(loader) and not isinstance(loader, Mapping):
        raise UserError(
            f"{source} a {type(loader).__name__} of loaders: give a dict of them by name, such as "
            "{'clean': …, 'noisy': …}; their values are logged as val_loss/clean, val_loss/noisy"
        )
    if not isinstance(loader, Mapping):
        check(loader, source)
        return {"": loader}
    if not loader:
        raise UserError(f"{source} an empty dict: give one loader, or a dict of them by name")
    for name, each in loader.items():
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise UserError(f"{source} a loader named {shown(name)}: give each a name, a string")
        check(each, f"{source}, as {name!r},")
    return dict(loader)


def check(loader: Any, source: str) -> None:
    """Check that a value is an iterable of batches.

    Args:
        loader: The value.
        source: Where it comes from: ``"Digits.train_dataloader returned"``.

    Raises:
        UserError: It is not an iterable of batches, or has too many workers.
    """
    kind = type(loader).__name__
    if isinstance(loader, Dataset):
        raise UserError(
            f"{source} {kind}, a dataset, which yields single samples: return "
            f"DataLoader({kind}(…), batch_size=…)"
        )
    if _is_several(loader):
        raise UserError(
            f"{source} a {kind} of loaders: one loader is supported; join the datasets with "
            "torch.utils.data.ConcatDataset, or give one of them"
        )
    if isinstance(loader, Mapping | str | bytes | Tensor) or not hasattr(loader, "__iter__"):
        raise UserError(
            f"{source} {kind}, which is not an iterable of batches: return a DataLoader, or "
            "another iterable whose every element is a batch"
        )
    workers, most = getattr(loader, "num_workers", 0), _MOST_WORKERS * (os.cpu_count() or 1)
    if isinstance(workers, int) and workers > most:
        raise UserError(
            f"{source} a loader with num_workers={workers}: each is a process, and this machine "
            f"has {os.cpu_count()} cores; give at most {most}"
        )


def check_repeats(loader: Any, source: str) -> None:
    """Check that each epoch of a fit can read a loader: a generator is empty after the first.

    Args:
        loader: A loader, or a dict of loaders by name.
        source: As in :func:`check`.

    Raises:
        UserError: It can be read only once.
    """
    for each in loader.values() if isinstance(loader, Mapping) else [loader]:
        # Other classes may begin again in their __iter__.
        is_plain = isinstance(each, Iterator) and not isinstance(type(each).__iter__, FunctionType)
        if is_plain or isinstance(each, _BaseDataLoaderIter):
            raise UserError(
                f"{source} a {type(each).__name__}, which can be read only once, and a fit reads "
                "it in each epoch: return a DataLoader, or an object whose __iter__ begins again"
            )


def _is_several(loader: Any) -> bool:
    several = loader.values() if isinstance(loader, Mapping) else loader
    return isinstance(loader, Mapping | list | tuple) and any(
        isinstance(each, DataLoader | Dataset) for each in several
    )


def is_empty(batch: Any) -> bool:
    """Whether a batch contains tensors, and all of them are empty."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if isinstance(first, Tensor) and first.ndim and first.shape[0]:
        return False  # nearly all batches, in a third of the time
    lengths = _lengths(batch)
    return bool(lengths) and not any(lengths)


def _lengths(batch: Any) -> list[int]:
    """The first dimension of each tensor in a batch."""
    if isinstance(batch, Tensor):
        return [batch.shape[0]] if batch.ndim else []
    return [length for value in parts(batch) for length in _lengths(value)]


def parts(batch: Any) -> list[Any]:
    """The values of a dict, list, tuple or dataclass; an empty list for other types."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = (each.name for each in dataclasses.fields(batch))
        return [getattr(batch, name) for name in fields if hasattr(batch, name)]
    return []
