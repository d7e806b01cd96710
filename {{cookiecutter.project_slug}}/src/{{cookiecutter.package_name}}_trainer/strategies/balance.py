"""Divide a sequence of layers into stages of a pipeline."""

import functools
import math
from collections.abc import Callable, Sequence


def divide(cost: Callable[[int, range], float], count: int, stages: int) -> list[int]:
    """Divide children into stages of neighbors, so that the largest cost of a stage is least.

    Args:
        cost: Cost of a stage, counted from 0, that has some of the children.
        count: Number of children.
        stages: Number of stages, at most that of the children.

    Returns:
        Number of children of each stage, at least one.
    """

    @functools.cache
    def best(stages: int, end: int) -> tuple[float, tuple[int, ...]]:
        """The largest cost of the best division of the first children, and its sizes."""
        if not stages:
            return (math.inf if end else 0.0), ()
        found: tuple[float, tuple[int, ...]] = math.inf, ()
        for start in range(stages - 1, end):
            before, sizes = best(stages - 1, start)
            if before < found[0]:
                largest = max(before, cost(stages - 1, range(start, end)))
                found = min(found, (largest, (*sizes, end - start)), key=lambda each: each[0])
        return found

    return list(best(stages, count)[1])


def total(costs: Sequence[float]) -> Callable[[int, range], float]:
    """The cost of a stage, for :func:`divide`: the sum of its children's."""
    return lambda stage, indices: sum(costs[index] for index in indices)
