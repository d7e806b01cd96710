"""What a run directory says of a run; what is missing or damaged is said in words, not raised."""

import csv
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint import run_directory
from ...cli import config_files
from ...errors import ConfigurationError, one_line
from ...logging.remote_loggers import flat
from ...options import redaction
from .traces import Trace, read_traces

Series = dict[str, list[tuple[int, float]]]
"""Values by name: the step, counted from 1, and the value."""


@dataclass(frozen=True)
class Run:
    """A run, as its directory describes it."""

    name: str
    attempts: list[dict[str, Any]]
    """Those of ``run.json``, the first one first."""
    facts: dict[str, str]
    """What ``run.json`` says of the last attempt, by dotted key."""
    config: dict[str, str]
    """Options of ``config.yaml`` by dotted key."""
    metrics: Series
    speed: Series
    traces: list[Trace]
    written_at: float | None
    """When its logs were last written, in seconds since 1970."""
    notes: list[str]
    """What is missing or damaged."""


def read(directory: Path, name: str = "") -> Run:
    """Read a run directory; ``name``: how the page calls it."""
    notes: list[str] = []
    metrics, speed = (_series(directory / f"{log}.csv", notes) for log in ("metrics", "speed"))
    if not (attempts := run_directory.attempts(directory)):
        notes.append("run.json: missing or damaged; attempts and environment are unknown")
    return Run(
        name=name,
        attempts=attempts,
        facts=dict(flat("", redaction.value(attempts[-1]))) if attempts else {},
        config=_config(directory / "config.yaml", notes),
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
            for row in itertools.islice(rows, 1, None):
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


def _config(path: Path, notes: list[str]) -> dict[str, str]:
    try:
        return dict(flat("", redaction.value(config_files.read_file(path.name, path))))
    except ConfigurationError as error:
        notes.append(str(error))
        return {}
