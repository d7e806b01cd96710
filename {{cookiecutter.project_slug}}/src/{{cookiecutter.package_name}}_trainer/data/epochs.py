"""``set_epoch`` of a loader and of all that it is made of."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

_MOST_ITEMS = 100  # of a list or dict of parts; a longer one has samples


def set_epoch(epoch: int, *owners: Any) -> None:
    """Call ``set_epoch`` of loaders, datasets, samplers, ``collate_fn``, and of their parts."""
    for each in parts(*owners):
        if callable(tell := getattr(each, "set_epoch", None)):
            tell(epoch)


def parts(*owners: Any) -> Iterator[Any]:
    """Yield objects and the datasets, samplers, loaders and transforms in them, each once."""
    waiting, seen = list(owners), set[int]()
    while waiting:
        part = waiting.pop(0)
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += filter(_is_part, _attributes(part))


def _attributes(owner: Any) -> Iterator[Any]:
    for value in list(getattr(owner, "__dict__", {}).values()):
        values = value.values() if isinstance(value, Mapping) else value
        is_group = isinstance(value, Mapping | list | tuple) and len(value) <= _MOST_ITEMS
        yield from list(values) if is_group else [value]


def _is_part(value: Any) -> bool:
    kinds = DataLoader, Dataset, Sampler, BatchSampler
    return isinstance(value, kinds) or callable(getattr(value, "set_epoch", None))
