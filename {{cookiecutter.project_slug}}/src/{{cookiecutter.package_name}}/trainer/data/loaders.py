"""Check loaders: a loader is an iterable of batches, such as a DataLoader."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import UserError


def check(loader: Any, source: str) -> None:
    """Check that a value is an iterable of batches.

    Args:
        loader: The value.
        source: Where it comes from: ``"Digits.train_dataloader returned"``.

    Raises:
        UserError: It is not an iterable of batches.
    """
    kind = type(loader).__name__
    if isinstance(loader, Dataset):
        raise UserError(
            f"{source} {kind}, a dataset, which yields single samples: return "
            f"DataLoader({kind}(…), batch_size=…)"
        )
    several = loader.values() if isinstance(loader, Mapping) else loader
    if isinstance(loader, Mapping | list | tuple) and any(
        isinstance(each, DataLoader | Dataset) for each in several
    ):
        raise UserError(
            f"{source} a {kind} of loaders: one loader is supported; join the datasets with "
            "torch.utils.data.ConcatDataset, or give one of them"
        )
    if isinstance(loader, Mapping | str | bytes | Tensor) or not hasattr(loader, "__iter__"):
        raise UserError(
            f"{source} {kind}, which is not an iterable of batches: return a DataLoader, or "
            "another "
            "iterable whose every element is a batch"
        )


def is_empty(batch: Any) -> bool:
    """Whether a batch contains tensors, and all of them are empty."""
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
