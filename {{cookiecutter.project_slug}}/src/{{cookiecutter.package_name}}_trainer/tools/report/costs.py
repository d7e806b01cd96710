"""Where the wall time of a run went, its restarts, and its effective training time."""

from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise

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
    def measured(self) -> float:
        """Seconds of the steps that count, and of validation and checkpoints between them."""
        return self.training + self.data + self.checkpoint + self.validation

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
    first = last = (run.attempts[0].first_step or 0) if run.attempts else 0
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
    known = steps + checkpoint + validation + lost + between
    start, stop = (run.attempts[0].started, end(run)) if run.attempts else (None, None)
    # Times of day are whole seconds, so a short run may seem shorter than its steps.
    wall = (stop - start).total_seconds() if start and stop else 0.0
    other = max(0.0, wall - known)
    return Spent(steps - data, data, checkpoint, validation, lost, between, other)


def restarts(run: Run) -> list[tuple[float | None, int | None]]:
    """For each restart: seconds since the attempt before, and its steps that were lost."""
    found: list[tuple[float | None, int | None]] = []
    for before, after in pairwise(run.attempts):
        gap = lost = None
        if before.ended_at is not None and after.started is not None:
            gap = max(0.0, (after.started - before.ended_at).total_seconds())
        if before.last_step is not None and after.first_step is not None:
            lost = max(0, before.last_step - after.first_step)
        found.append((gap, lost))
    return found


def end(run: Run) -> datetime | None:
    """When the run ended; without a record of that, when its logs were last written."""
    return run.attempts[-1].ended_at or run.written_at
