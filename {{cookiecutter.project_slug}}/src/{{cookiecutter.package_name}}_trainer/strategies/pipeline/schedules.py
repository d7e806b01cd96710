"""The order in which each process of a pipeline runs the micro-batches.

Sources: GPipe (https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/2006.09503),
interleaved 1F1B (https://arxiv.org/abs/2104.04473), zero bubble (ZB-H1,
https://arxiv.org/abs/2401.10241).
"""

from enum import IntEnum
from typing import NamedTuple

NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Kind(IntEnum):
    """What is computed of a micro-batch.

    ``BACKWARD``: all gradients. Zero bubble divides it: ``INPUTS``, the gradients of a stage's
    inputs, for which another process waits, and ``WEIGHTS``, those of its parameters.
    """

    FORWARD = 0
    BACKWARD = 1
    INPUTS = 2
    WEIGHTS = 3


class Action(NamedTuple):
    """A kind of computation, of a stage and a micro-batch, each counted from 0."""

    kind: Kind
    stage: int
    number: int


def order(name: str, process: int, processes: int, stages: int, count: int) -> list[Action]:
    """The order of a process.

    Args:
        name: One of :data:`NAMES`.
        process: Position of the process in the pipeline.
        processes: Number of processes of the pipeline.
        stages: Number of stages, a multiple of it; stage i is on process i modulo ``processes``.
        count: Number of micro-batches. ``"interleaved"`` interleaves only multiples of
            ``processes``; other counts run as with ``"gpipe"``.
    """
    # Groups of as many micro-batches as processes pass through all stages of a process in turn.
    own = range(process, stages, processes)
    pairs = [(stage, number) for stage in own for number in range(count)]
    pairs.sort(key=lambda pair: pair[1] // processes)
    forwards = [Action(Kind.FORWARD, *pair) for pair in pairs]
    pairs.sort(key=lambda pair: (pair[1] // processes, -pair[0]))
    kind = Kind.INPUTS if name == "zero_bubble" else Kind.BACKWARD
    backwards = [Action(kind, *pair) for pair in pairs]
    if name == "gpipe" or (name == "interleaved" and count % processes):
        return forwards + backwards
    alternating = _alternate(forwards, backwards, _warm_up(process, processes, len(own)))
    return _with_weights(alternating, process) if name == "zero_bubble" else alternating


def _warm_up(process: int, processes: int, rounds: int) -> int:
    """Number of forwards before a process of so many stages alternates forward and backward."""
    after = processes - process - 1
    return after if rounds == 1 else 2 * after + (rounds - 1) * processes


def _alternate(forwards: list[Action], backwards: list[Action], first: int) -> list[Action]:
    first = min(first, len(forwards))
    pairs = list(zip(forwards[first:], backwards, strict=False))
    return forwards[:first] + [each for pair in pairs for each in pair] + backwards[len(pairs) :]


def _with_weights(actions: list[Action], delay: int) -> list[Action]:
    """Compute the gradients of weights later, by so many micro-batches: at the end they fill the
    time in which the process would wait."""
    found: list[Action] = []
    waiting: list[Action] = []
    forwards = sum(each.kind is Kind.FORWARD for each in actions)
    for action in actions:
        found.append(action)
        if action.kind is Kind.FORWARD:
            forwards -= 1
            continue
        waiting.append(action._replace(kind=Kind.WEIGHTS))
        # Without forwards left, a backward from the next stage arrives in every second unit.
        if len(waiting) > delay or not forwards:
            found.append(waiting.pop(0))
    return found + waiting
