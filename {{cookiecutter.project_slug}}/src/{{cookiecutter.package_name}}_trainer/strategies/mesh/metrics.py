"""torchmetrics in a mesh: ranks of a replica see the same samples, which count once."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn


def _metrics(module: nn.Module) -> Iterator[Any]:
    for each in module.modules():
        if hasattr(each, "metric_state") and hasattr(each, "process_group"):
            yield each


class CountedOnce:
    """Makes metrics reduce over one rank of each replica, until :meth:`close`.

    Args:
        module: The user's module. Metrics with a process group of their own keep it.
        ranks: For each place in a replica, the ranks at this place.
    """

    def __init__(self, module: nn.Module, ranks: list[list[int]]) -> None:
        self._changed = [each for each in _metrics(module) if each.process_group is None]
        if self._changed:
            group, _ = dist.new_subgroups_by_enumeration(ranks)
            for each in self._changed:
                each.process_group = group

    def close(self) -> None:
        """Undo it; call this before the process group is destroyed."""
        for each in self._changed:
            each.process_group = None
        self._changed = []
