"""The state of torchmetrics metrics inside a module, for checkpoints and evaluation."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the state of every torchmetrics metric inside a module on exit."""
    kept = [(each, each._copy_state_dict(), each._update_count) for each in metrics(module)]
    try:
        yield
    finally:
        for metric, state, count in kept:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None


def state(module: nn.Module) -> dict[str, Tensor]:
    """This rank's state of every torchmetrics metric inside a module."""
    found: dict[str, Tensor] = {}
    for path, metric in _metrics(module):
        found[f"{path}:count"] = torch.tensor(metric._update_count)
        for name, value in metric.metric_state.items():
            parts = value if isinstance(value, list) else [value]
            kind = "list" if isinstance(value, list) else "tensor"
            found |= {f"{path}:{kind}:{name}:{index}": part for index, part in enumerate(parts)}
    return found


def metrics(module: nn.Module) -> list[Any]:
    """Every torchmetrics metric inside a module."""
    return [metric for _, metric in _metrics(module)]


def load(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restore a state of :func:`state`."""
    metrics = dict(_metrics(module))
    for key, value in sorted(saved.items(), key=lambda item: _numbered(item[0])):
        path, kind, *rest = key.split(":")
        if path not in metrics:
            continue
        metric = metrics[path]
        if kind == "count":
            metric._update_count = int(value)
        elif kind == "list":
            getattr(metric, rest[0]).append(value.to(metric.device))
        else:
            setattr(metric, rest[0], value.to(metric.device))


def _numbered(key: str) -> tuple[str, int]:
    head, _, tail = key.rpartition(":")
    return head, int(tail) if tail.isdigit() else -1


def _metrics(module: nn.Module) -> Iterable[tuple[str, Any]]:
    for path, child in module.named_modules():
        if hasattr(child, "metric_state") and hasattr(child, "_update_count"):
            yield path, child
