"""Where the wall time of a run went, its restarts, and its effective training time."""

from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from .reading import Run

_STEP = "speed/seconds_per_step"


@dataclass(frozen=True)
class Spent:
    """Seconds from the first start to the last known moment.

    ``training``: of the steps that count, without their waits for data (``data``). ``repeated``:
    steps that were trained, lost by a restart, and trained again. ``between``: between attempts.
    ``other``: the rest: start-up, and what is not measured, such as what follows the last step.
    """

    wall: float | None
    training: float
    data: float
    checkpoint: float
    validation: float
    repeated: float
    between: float
    steps: int

    @property
    def steps_seconds(self) -> float:
        """Seconds of the steps that count."""
        return self.training + self.data

    @property
    def measured(self) -> float:
        """Seconds of the steps that count, and of validation and checkpoints between them."""
        return self.steps_seconds + self.checkpoint + self.validation

    @property
    def effective(self) -> float | None:
        """Effective training time: share of the wall time that trained steps that count."""
        return self.steps_seconds / self.wall if self.wall and self.steps else None

    def parts(self) -> dict[str, float]:
        """Seconds by what they were spent on."""
        named = ("training", "data", "checkpoint", "validation", "repeated", "between")
        found = {name: float(getattr(self, name)) for name in named}
        return found | {"other": max(0.0, (self.wall or 0.0) - sum(found.values()))}


def spent(run: Run) -> Spent:
    """Add up a run's time, from its logs and attempts."""
    waits, start = dict(run.speed.get("speed/data_wait", [])), 0
    if run.attempts and run.attempts[0].first_step:
        start = run.attempts[0].first_step
    training = data = 0.0
    rows = sorted(dict(run.speed.get(_STEP, [])).items())
    for step, each in rows:
        seconds, start = each * max(0, step - start), step
        wait = waits.get(step, 0.0)
        training, data = training + seconds * (1 - wait), data + seconds * wait
    steps = rows[-1][0] - ((run.attempts[0].first_step or 0) if run.attempts else 0) if rows else 0
    per_step = (training + data) / steps if steps > 0 else 0.0
    gaps = [gap for gap, _ in restarts(run) if gap is not None]
    known = sum((training, data, *(_sum(run, each) for each in ("checkpoint", "validation"))))
    wall = _wall(run)
    return Spent(
        # Times of day have seconds only.
        wall=None if wall is None else max(wall, known),
        training=training,
        data=data,
        checkpoint=_sum(run, "checkpoint"),
        validation=_sum(run, "validation"),
        repeated=per_step * sum(lost or 0 for _, lost in restarts(run)),
        between=sum(gaps),
        steps=steps,
    )


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


def _sum(run: Run, what: str) -> float:
    return sum(value for _, value in run.speed.get(f"speed/{what}_seconds", []))


def _wall(run: Run) -> float | None:
    first, last = (run.attempts[0].started, end(run)) if run.attempts else (None, None)
    return None if first is None or last is None else (last - first).total_seconds()


def end(run: Run) -> datetime | None:
    """When the run ended; without a record of that, when its logs were last written."""
    recorded = run.attempts[-1].ended_at if run.attempts else None
    return recorded or run.written_at
