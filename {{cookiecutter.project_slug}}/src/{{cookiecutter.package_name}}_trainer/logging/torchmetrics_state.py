"""The state of torchmetrics metrics inside a module, for checkpoints and evaluation."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..launch import collectives

_MOST = 100  # items of a container in which metrics are looked for
_EVALUATED = "_count_after_evaluation"  # attribute of a metric: its update count then
_BESIDE_STATE = ("min_val", "max_val", "_num_vals_seen")  # of MinMaxMetric and Running


@contextlib.contextmanager
def unchanged(module: nn.Module, samples: float = 0) -> Iterator[None]:
    """Restore the state of torchmetrics metrics in a module on exit, unless ``samples`` count."""
    kept = [(metric, _copied(metric)) for metric in ([] if samples else metrics(module))]
    trackers = [] if samples else [(t, dict(t._modules)) for t in _trackers(module).values()]
    try:
        yield
    finally:
        for tracker, steps in trackers:
            tracker._modules.clear()
            tracker._modules.update(steps)
        for metric, values in kept:
            vars(metric).update(values)


@contextlib.contextmanager
def set_aside(module: nn.Module, logged: Iterable[Any]) -> Iterator[None]:
    """Keep what training has added to metrics apart from an evaluation, which may use the same.

    One that the evaluation changes, and neither logs nor resets, keeps the values of that, also in
    the next evaluation unless training has changed it: such as the best value so far.
    """
    by_id = {id(metric): metric for metric in (*metrics(module), *filter(_is_metric, logged))}
    used = [m for m in by_id.values() if m._update_count != vars(m).get(_EVALUATED, 0)]
    kept = {id(metric): _copied(metric) for metric in used}
    for metric in used:
        metric.reset()
    yield
    by_id |= {id(metric): metric for metric in metrics(module)}  # those of a tracker's new step
    for key, metric in by_id.items():
        if key in kept and not metric._update_count:
            vars(metric).update(kept[key])
        else:
            vars(metric)[_EVALUATED] = metric._update_count


def sync_evenly(module: nn.Module) -> None:
    """Let metrics gather lists of which ranks have different numbers of items, or none.

    torchmetrics gathers a list without a reduction item by item, and would wait forever. For a list
    to concatenate, a rank without items gives floats of one dimension, whatever the others'.
    """
    for metric in metrics(module) if collectives.world_size() > 1 else ():
        if _lists(metric):
            vars(metric)["_sync_dist"] = partial(_sync, metric)


def _lists(metric: Any) -> dict[str, list[Any]]:
    """The states of a metric that are lists; one that is to be concatenated has an item at most."""
    states = {name: getattr(metric, name) for name in metric._reductions}
    lists = {name: items for name, items in states.items() if isinstance(items, list)}
    for name, items in lists.items():
        if items and _is_concatenated(metric, name):
            lists[name] = [torch.cat([item if item.ndim else item[None] for item in items])]
    return lists


def _is_concatenated(metric: Any, name: str) -> bool:
    return getattr(metric._reductions[name], "__name__", "") == "dim_zero_cat"


def _sync(metric: Any, dist_sync_fn: Callable[..., Any], process_group: Any = None) -> None:
    """Gather a metric's states; of a list whose lengths differ, all items in one tensor."""
    lists = _lists(metric)
    kinds = {name: {_kind(metric, name, item) for item in lists[name]} for name in lists}
    facts = {name: [len(items), *kinds[name]] for name, items in lists.items()}
    known = collectives.gather(facts, process_group or metric.process_group)
    uneven = [name for name in lists if len({of_rank[name][0] for of_rank in known}) > 1]
    for name in uneven:
        of_ranks = {tuple(kind) for of_rank in known for kind in of_rank[name][1:]}
        if len(of_ranks) > 1 or () in of_ranks:
            problem = f"{type(metric).__name__}.{name} has different numbers of items on ranks"
            raise UserError(f"{problem}, and not only tensors of one data type: gather it yourself")
        dtype, *shape = of_ranks.pop()
        empty = torch.empty(0, *shape, dtype=getattr(torch, dtype), device=metric.device)
        if _is_concatenated(metric, name):
            lists[name] = lists[name] or [empty]
            continue
        sizes = [size for item in lists[name] for size in (item.ndim, *item.shape)]
        shapes = torch.tensor(sizes, dtype=torch.int64, device=metric.device)
        lists[name] = [torch.cat([empty, *(item.reshape(-1) for item in lists[name])]), shapes]
    for name, items in lists.items():
        setattr(metric, name, items)
    type(metric)._sync_dist(metric, dist_sync_fn, process_group)
    for name in uneven:
        if not _is_concatenated(metric, name):
            merged = getattr(metric, name)
            ranks = zip(merged[: len(known)], merged[len(known) :], strict=True)
            setattr(metric, name, [item for pair in ranks for item in _items(*pair)])


def _kind(metric: Any, name: str, item: Any) -> tuple[Any, ...]:
    """Data type of an item of a list, and its sizes but the first if it will be concatenated."""
    if not isinstance(item, Tensor):
        return ()
    sizes = item.shape[1:] if _is_concatenated(metric, name) else ()
    return (str(item.dtype).removeprefix("torch."), *sizes)


def _items(flat: Tensor, shapes: Tensor) -> Iterator[Tensor]:
    sizes = iter(shapes.tolist())
    for ndim in sizes:
        shape = [next(sizes) for _ in range(ndim)]
        item, flat = flat[: math.prod(shape)], flat[math.prod(shape) :]
        yield item.reshape(shape)


def _copied(metric: Any) -> dict[str, Any]:
    counts = {"_update_count": metric._update_count, _EVALUATED: vars(metric).get(_EVALUATED, 0)}
    return {**metric._copy_state_dict(), **_beside_state(metric), **counts, "_computed": None}


def _beside_state(metric: Any) -> dict[str, Any]:
    return {name: vars(metric)[name] for name in _BESIDE_STATE if name in vars(metric)}


def state(module: nn.Module) -> dict[str, Tensor]:
    """This rank's state of every torchmetrics metric inside a module."""
    tensors: dict[str, Tensor] = {}
    for path, metric in by_path(module).items():
        counts = [metric._update_count, vars(metric).get(_EVALUATED, 0)]
        tensors[f"{path}:count"] = torch.tensor(counts)
        for name, value in {**metric.metric_state, **_beside_state(metric)}.items():
            kind, parts = ("list", value) if isinstance(value, list) else ("tensor", [value])
            items = enumerate(map(torch.as_tensor, parts))
            tensors |= {f"{path}:{kind}:{name}:{at:09}": item for at, item in items}
    return tensors


def metrics(module: nn.Module) -> list[Any]:
    """Every torchmetrics metric inside a module."""
    return list(by_path(module).values())


def load(module: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Restore results of :func:`state`, in place of what an earlier fit has left.

    Those of several ranks are merged; returns a note on each metric that cannot be merged.
    """
    saved_paths = {key.partition(":")[0] for of_rank in states[:1] for key in of_rank}
    for path, tracker in _trackers(module).items():
        while any(saved.startswith(f"{path}.{len(tracker)}") for saved in saved_paths):
            tracker.increment()
    merged, lost = by_path(module), set[str]()
    for metric in merged.values():
        metric.reset()
        vars(metric)[_EVALUATED] = 0
    if states:
        _load(merged, states[0])
    for saved in states[1:]:
        others = {path: copy.deepcopy(metric) for path, metric in merged.items()}
        for metric in others.values():
            metric.reset()
        _load(others, saved)
        for path in [path for path, other in others.items() if other._update_count]:
            metric, other = merged[path], others[path]
            count = metric._update_count + other._update_count
            try:
                metric.merge_state(other.metric_state)
            except (RuntimeError, TypeError):  # torchmetrics' own answer for some metrics
                lost.add(path)
            metric._update_count, metric._computed = count, None
            vars(metric)[_EVALUATED] += vars(other)[_EVALUATED]
    for path in lost:
        merged[path].reset()
    why = "the values so far in this epoch are lost: those of ranks cannot be merged"
    return [f"{path}: {why}" for path in sorted(lost)]


def _load(metrics: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
    for key in sorted(saved):  # items of a list in their order
        path, kind, *rest = key.split(":")
        if (metric := metrics.get(path)) is None:
            continue
        value = saved[key].to(metric.device)
        if kind == "count":
            metric._update_count, vars(metric)[_EVALUATED] = value.tolist()
        elif kind == "list":
            getattr(metric, rest[0]).append(value)
        else:
            is_number = isinstance(getattr(metric, rest[0]), int)
            setattr(metric, rest[0], int(value) if is_number else value)


def by_path(module: nn.Module) -> dict[str, Any]:
    """Every torchmetrics metric inside a module, by a name that is the same on every rank."""
    by_id = {id(item): (path, item) for path, item in module.named_modules() if _is_metric(item)}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name != "_modules":
                for inner, metric in _contained(f"{path}.{name}", value):
                    by_id.setdefault(id(metric), (inner, metric))
    return dict(by_id.values())


def _contained(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The metrics in a small dict, list or tuple, which torch does not find."""
    if isinstance(value, dict | list | tuple) and len(value) <= _MOST and path.count("[") < 3:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            inner = f"{path}[{key}]".replace(":", "~")  # which separates the parts of a name
            if isinstance(item, nn.Module):
                named = item.named_modules(prefix=inner)
                yield from ((name, of) for name, of in named if _is_metric(of))
            else:
                yield from _contained(inner, item)


def _trackers(module: nn.Module) -> dict[str, Any]:
    """Every MetricTracker inside a module, which adds a metric with each step."""
    return {path: m for path, m in module.named_modules() if type(m).__name__ == "MetricTracker"}


def _is_metric(value: Any) -> bool:
    return hasattr(value, "metric_state") and hasattr(value, "_update_count")
