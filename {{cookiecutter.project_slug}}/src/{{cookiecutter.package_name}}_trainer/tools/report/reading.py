"""What a run directory says of a run; what is missing or damaged is said in words, not raised."""

import csv
from collections.abc import Mapping
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoint import run_directory
from ...cli import config_files
from ...errors import ConfigurationError, one_line
from ...logging.remote_loggers import flat
from ...options import redaction
from .traces import Trace, read_traces

Series = dict[str, list[tuple[int, float]]]
"""Values by name: the step, counted from 1, and the value."""


class Spent(NamedTuple):
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
        return float(sum(self))

    @property
    def effective(self) -> float:
        """Effective training time: share of the wall time that trained steps that count."""
        return (self.training + self.data) / (self.wall or 1.0)


class Run(NamedTuple):
    """A run, as its directory describes it.

    ``attempts``: those of ``run.json``, the first one first; ``facts``: what it says of the last
    one, by dotted key; ``config``: options of ``config.yaml``, likewise; ``written_at``: when its
    logs were last written, in seconds since 1970; ``notes``: what is missing or damaged.
    """

    name: str
    attempts: list[dict[str, Any]]
    facts: dict[str, str]
    config: dict[str, str]
    metrics: Series
    speed: Series
    traces: list[Trace]
    written_at: float | None
    notes: list[str]

    @property
    def restarts(self) -> list[tuple[float | None, int | None]]:
        """For each restart: seconds since the attempt before, and its steps that were lost."""
        found = []
        for before, after in pairwise(self.attempts):
            ended, started = _time(before, "ended_at"), _time(after, "started")
            last, first = _step(before, "last_step"), _step(after, "first_step")
            gap = None if ended is None or started is None else max(0.0, started - ended)
            found.append((gap, None if last is None or first is None else max(0, last - first)))
        return found

    @property
    def spent(self) -> Spent:
        """Where its time went, by its logs and attempts."""
        attempts, waits = self.attempts or [{}], dict(self.speed.get("speed/data_wait", []))
        first = last = _step(attempts[0], "first_step") or 0
        steps = data = 0.0
        for step, each in sorted(dict(self.speed.get("speed/seconds_per_step", [])).items()):
            seconds, last = each * max(0, step - last), max(step, last)
            steps, data = steps + seconds, data + seconds * waits.get(step, 0.0)
        checkpoint, validation = (
            sum(value for _, value in self.speed.get(f"speed/{what}_seconds", []))
            for what in ("checkpoint", "validation")
        )
        lost = sum(lost or 0 for _, lost in self.restarts) * steps / max(1, last - first)
        between = sum(gap or 0.0 for gap, _ in self.restarts)
        start, end = _time(attempts[0], "started"), _time(attempts[-1], "ended_at")
        wall = (end or self.written_at or start) - start if start else 0.0
        # Times of day are whole seconds, so a short run may seem shorter than its steps.
        other = max(0.0, wall - (steps + checkpoint + validation + lost + between))
        return Spent(steps - data, data, checkpoint, validation, lost, between, other)


def _step(attempt: Mapping[str, Any], name: str) -> int | None:
    found = attempt.get(name)
    return found if isinstance(found, int) else None


def _time(attempt: Mapping[str, Any], name: str) -> float | None:
    try:
        return datetime.strptime(str(attempt.get(name)), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def read(directory: Path, name: str = "") -> Run:
    """Read a run directory; ``name``: how the page calls it."""
    notes: list[str] = []
    metrics, speed = (_series(directory / f"{log}.csv", notes) for log in ("metrics", "speed"))
    if not (attempts := run_directory.attempts(directory)):
        notes.append("run.json: missing or damaged; attempts and environment are unknown")
    config: dict[Any, Any] = {}
    try:
        config = config_files.read_file("config.yaml", directory / "config.yaml")
    except ConfigurationError as error:
        notes.append(str(error))
    return Run(
        name=name,
        attempts=attempts,
        facts=dict(flat("", redaction.value(attempts[-1]))) if attempts else {},
        config=dict(flat("", redaction.value(config))),
        metrics=metrics,
        speed=speed,
        traces=read_traces(directory / "profile", notes),
        written_at=max((path.stat().st_mtime for path in directory.glob("*.csv")), default=None),
        notes=notes,
    )


def _series(path: Path, notes: list[str]) -> Series:
    """Values of a log; rows that are damaged are left out."""
    found: Series = {}
    damaged: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(file)
            for row in islice(rows, 1, None):
                try:
                    step, _, name, value = row
                    found.setdefault(name, []).append((int(step), float(value)))
                except ValueError:
                    damaged.append(rows.line_num)
    except FileNotFoundError:
        notes.append(f"{path.name}: does not exist; the logger csv writes it")
    except (OSError, csv.Error) as error:
        notes.append(f"{path.name}: cannot be read to its end ({one_line(error)})")
    if damaged:
        lines = f"{len(damaged)} damaged row{'s' * (len(damaged) > 1)} left out"
        notes.append(f"{path.name}: {lines}, first in line {damaged[0]}")
    return found
