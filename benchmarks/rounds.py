"""Rounds of measurements side by side, and ratios within a round, with their spread."""

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
            reading = measure(name)
            rounds[name].append(reading)
            if lines is not None:
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"round": number + 1, "name": name, **reading}) + "\n")
            shown = ", ".join(f"{key} {value:.3f}" for key, value in reading.items())
            print(f"{number + 1}: {name}: {shown}", file=sys.stderr, flush=True)
    return rounds


def column(readings: Sequence[Reading], key: str) -> list[float]:
    """One number of each round."""
    return [reading[key] for reading in readings]


def middle(readings: Sequence[Reading], key: str) -> float:
    """The median of one number."""
    return median(column(readings, key))


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Within each round."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def differences(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Within each round."""
    return [value - base for value, base in zip(values, bases, strict=True)]


def spread(values: Sequence[float], digits: int, sign: bool = False) -> str:
    """The median, with the minimum and maximum in parentheses."""
    form = f"{'+' if sign else ''}.{digits}f"
    return f"{median(values):{form}} ({min(values):{form}} … {max(values):{form}})"


def check_losses(
    rounds: Mapping[Name, Sequence[Reading]], base: Name, ratio: float, more: float = 0.0
) -> None:
    """All must have come near the loss of `base`, up to this ratio of it and `more`.

    Otherwise they did not do the same work.
    """
    for name, readings in rounds.items():
        for reading, expected in zip(readings, rounds.get(base, []), strict=False):
            if abs(reading["loss"] - expected["loss"]) > ratio * expected["loss"] + more:
                losses = f"{reading['loss']:.3f}, not near {expected['loss']:.3f}"
                raise SystemExit(f"{name} ends at {losses}")
