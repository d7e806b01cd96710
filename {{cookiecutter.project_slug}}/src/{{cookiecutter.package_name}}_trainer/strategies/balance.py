"""Divide a sequence of layers into stages of a pipeline."""

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
    # Largest cost of the best division of the first children, and its last bound.
    best = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    cut = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                before = best[stage - 1][start]
                if before < best[stage][end]:
                    largest = max(before, cost(stage - 1, range(start, end)))
                    if largest < best[stage][end]:
                        best[stage][end], cut[stage][end] = largest, start
    sizes, end = [], count
    for stage in range(stages, 0, -1):
        sizes.append(end - cut[stage][end])
        end = cut[stage][end]
    return sizes[::-1]


def total(costs: Sequence[float]) -> Callable[[int, range], float]:
    """The cost of a stage, for :func:`divide`: the sum of its children's."""
    return lambda stage, indices: sum(costs[index] for index in indices)
