"""Rounds of measurements side by side, and ratios within a round, with their spread."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

Reading = Mapping[str, float]
Name = TypeVar("Name", bound=Hashable)


def ordered(names: Sequence[Name], number: int) -> Sequence[Name]:
    """Every other round runs backwards, so that a machine that slows down favors nobody."""
    return names[::-1] if number % 2 else names


def play(
    names: Sequence[Name],
    measure: Callable[[Name], Reading],
    count: int,
    seconds: float = math.inf,
    lines: Path | None = None,
) -> dict[Name, list[Reading]]:
    """Measure each in every round.

    Args:
        names: what is measured.
        measure: measures one.
        count: of rounds; fewer where the next would end too late.
        seconds: for all of them.
        lines: file to which each measurement is added, so that a later failure does not cost it.
    """
    rounds: dict[Name, list[Reading]] = {name: [] for name in names}
    began = time.monotonic()
    for number in range(count):
        if number and (time.monotonic() - began) * (number + 1) / number > seconds:
            print(f"{number} rounds: no time for another (--seconds)", file=sys.stderr, flush=True)
            break
        for name in ordered(names, number):
            result = measure(name)
            rounds[name].append(result)
            if lines is not None:
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"round": number + 1, "name": name, **result}) + "\n")
            shown = ", ".join(f"{key} {value:.3f}" for key, value in result.items())
            print(f"{number + 1}: {name}: {shown}", file=sys.stderr, flush=True)
    return rounds


def column(results: Sequence[Reading], key: str) -> list[float]:
    """One number of each round."""
    return [result[key] for result in results]


def middle(results: Sequence[Reading], key: str) -> float:
    """The median of one number."""
    return median(column(results, key))


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Within each round."""
    return [own / other for own, other in zip(mine, others, strict=True)]


def differences(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Within each round."""
    return [own - other for own, other in zip(mine, others, strict=True)]


def spread(values: Sequence[float], digits: int, sign: bool = False) -> str:
    """The median, with the minimum and maximum in parentheses."""
    form = f"{'+' if sign else ''}.{digits}f"
    return f"{median(values):{form}} ({min(values):{form}} … {max(values):{form}})"


def check_losses(
    rounds: Mapping[Name, Sequence[Reading]], base: Name, part: float, more: float = 0.0
) -> None:
    """All must have come near one contestant's loss, or they did not do the same work.

    Args:
        rounds: of all contestants.
        base: the one beside which the others are shown.
        part: of its loss, by which another's may differ.
        more: what is added to this.
    """
    for name, results in rounds.items():
        for mine, other in zip(results, rounds.get(base, []), strict=False):
            loss, expected = mine["loss"], other["loss"]
            if abs(loss - expected) > part * expected + more:
                raise SystemExit(f"{name} ends at {loss:.3f}, not near {expected:.3f}")
