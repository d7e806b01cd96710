"""Call ``set_epoch`` on a loader and on everything that it contains."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

_MOST_ITEMS = 100  # of a list or dict of components; a longer one contains samples


def set_epoch(epoch: int, *owners: Any) -> None:
    """Call ``set_epoch`` on loaders, datasets, samplers, ``collate_fn``, and all they contain."""
    for component in components(*owners):
        if callable(method := getattr(component, "set_epoch", None)):
            method(epoch)


def components(*owners: Any) -> Iterator[Any]:
    """Yield objects and the datasets, samplers, loaders and transforms in them, each once."""
    queue, seen = list(owners), set[int]()
    while queue:
        component = queue.pop(0)
        if id(component) not in seen:
            seen.add(id(component))
            yield component
            queue += filter(_is_component, _attributes(component))


def _attributes(owner: Any) -> Iterator[Any]:
    for value in list(getattr(owner, "__dict__", {}).values()):
        values = value.values() if isinstance(value, Mapping) else value
        is_group = isinstance(value, Mapping | list | tuple) and len(value) <= _MOST_ITEMS
        yield from list(values) if is_group else [value]


def _is_component(value: Any) -> bool:
    kinds = DataLoader, Dataset, Sampler, BatchSampler
    return isinstance(value, kinds) or callable(getattr(value, "set_epoch", None))
