"""Where the wall time of a run went, its restarts, and its effective training time."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from .reading import Run


@dataclass(frozen=True)
class Spent:
    """Seconds since the first start, by what they were spent on.

    ``training``: the steps that count, without their waits for ``data``; ``repeated``: steps that a
    restart has lost; ``between``: from the end of an attempt to the next one; ``other``: start-up,
    and what is not measured, such as what follows the last logged step.
    """

    training: float
    data: float
    checkpoint: float
    validation: float
    repeated: float
    between: float
    other: float

    @property
    def wall(self) -> float:
        """All seconds."""
        return float(sum(asdict(self).values()))

    @property
    def effective(self) -> float:
        """Effective training time: share of the wall time that trained steps that count."""
        return (self.training + self.data) / (self.wall or 1.0)


def spent(run: Run) -> Spent:
    """Add up a run's time, from its logs and attempts."""
    waits = dict(run.speed.get("speed/data_wait", []))
    first = last = (_step(run.attempts[0], "first_step") or 0) if run.attempts else 0
    steps = data = 0.0
    for step, each in sorted(dict(run.speed.get("speed/seconds_per_step", [])).items()):
        seconds, last = each * max(0, step - last), max(step, last)
        steps, data = steps + seconds, data + seconds * waits.get(step, 0.0)
    checkpoint, validation = (
        sum(value for _, value in run.speed.get(f"speed/{what}_seconds", []))
        for what in ("checkpoint", "validation")
    )
    lost = sum(lost or 0 for _, lost in restarts(run)) * steps / max(1, last - first)
    between = sum(gap or 0.0 for gap, _ in restarts(run))
    start = _time(run.attempts[0], "started") if run.attempts else None
    end = (_time(run.attempts[-1], "ended_at") if run.attempts else None) or run.written_at
    wall = end - start if start and end else 0.0
    # Times of day are whole seconds, so a short run may seem shorter than its steps.
    other = max(0.0, wall - (steps + checkpoint + validation + lost + between))
    return Spent(steps - data, data, checkpoint, validation, lost, between, other)


def restarts(run: Run) -> list[tuple[float | None, int | None]]:
    """For each restart: seconds since the attempt before, and its steps that were lost."""
    found = []
    for before, after in pairwise(run.attempts):
        ended, started = _time(before, "ended_at"), _time(after, "started")
        last, first = _step(before, "last_step"), _step(after, "first_step")
        gap = None if ended is None or started is None else max(0.0, started - ended)
        found.append((gap, None if last is None or first is None else max(0, last - first)))
    return found


def _step(attempt: Mapping[str, Any], name: str) -> int | None:
    found = attempt.get(name)
    return found if isinstance(found, int) else None


def _time(attempt: Mapping[str, Any], name: str) -> float | None:
    try:
        return datetime.strptime(str(attempt.get(name)), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
