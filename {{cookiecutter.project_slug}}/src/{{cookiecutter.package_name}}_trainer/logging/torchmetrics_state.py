"""The state of torchmetrics metrics inside a module, for checkpoints and evaluation."""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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

    torchmetrics gathers a list item by item, and would wait forever. Of a list that it
    concatenates, a rank without items gives floats of one dimension, whatever the others have.
    """
    for metric in metrics(module) if collectives.world_size() > 1 else ():
        if _lists(metric) and metric.dist_sync_fn is None:
            vars(metric)["_sync_dist"] = functools.partial(_sync, metric)


def _lists(metric: Any) -> dict[str, list[Any]]:
    states = {name: getattr(metric, name) for name in metric._reductions}
    return {name: items for name, items in states.items() if isinstance(items, list)}


def _sync(metric: Any, dist_sync_fn: Callable[..., Any], process_group: Any = None) -> None:
    """Gather a metric's states: lists of tensors here, and all else as torchmetrics does."""
    group, kept = process_group or metric.process_group, metric._reductions
    forms = {name: [_form(item) for item in items] for name, items in _lists(metric).items()}
    known = collectives.gather(forms, group)
    of_ranks = {name: [of_rank[name] for of_rank in known] for name in forms}
    done = {name for name in forms if _gather(metric, name, of_ranks[name], group)}
    metric._reductions = {name: how for name, how in kept.items() if name not in done}
    try:
        type(metric)._sync_dist(metric, dist_sync_fn, process_group)
    finally:
        metric._reductions = kept


def _gather(metric: Any, name: str, forms: Sequence[Sequence[Any]], group: Any) -> bool:
    """Gather a list of tensors, whose forms on each rank are known; False if it is another one."""
    kinds = {form[0] for of_rank in forms for form in of_rank}
    if not kinds or "" in kinds:
        return False
    # Ranks gather tensors of one data type.
    dtype = functools.reduce(torch.promote_types, (getattr(torch, kind) for kind in kinds))
    empty = torch.empty(0, dtype=dtype, device=metric.device)
    flat = torch.cat([empty, *(item.reshape(-1) for item in getattr(metric, name))])
    per_rank = zip(collectives.all_gather(flat, group), forms, strict=True)
    items = [item for tensor, of_rank in per_rank for item in _items(tensor, of_rank)]
    reduce = metric._reductions[name]
    setattr(metric, name, reduce(items) if reduce else items)
    return True


def _form(item: Any) -> list[Any]:
    """Data type and shape of a tensor."""
    is_tensor = isinstance(item, Tensor)
    return [str(item.dtype).removeprefix("torch."), *item.shape] if is_tensor else [""]


def _items(flat: Tensor, forms: Sequence[Sequence[Any]]) -> Iterator[Tensor]:
    for kind, *shape in forms:
        item, flat = flat[: math.prod(shape)], flat[math.prod(shape) :]
        yield item.reshape(shape).to(getattr(torch, kind))


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
