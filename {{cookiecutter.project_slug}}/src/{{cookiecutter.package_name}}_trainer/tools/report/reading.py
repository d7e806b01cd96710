"""What a run directory says of a run; what is missing or damaged is said in words, not raised."""

import csv
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ...cli import config_files
from ...errors import ConfigurationError, one_line
from ...options import redaction
from .traces import Trace, read_traces

Series = dict[str, list[tuple[int, float]]]
"""Values by name: the step, counted from 1, and the value."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as ``run.json`` has it; ``None``: it does not say."""

    facts: Mapping[str, Any]
    started: datetime | None
    ended_at: datetime | None
    first_step: int | None
    last_step: int | None

    @property
    def outcome(self) -> str:
        """How it ended, in words."""
        return str(self.facts.get("ended") or "no end recorded: running, or killed")


@dataclass(frozen=True)
class Run:
    """A run: its attempts, values by name, configuration by dotted key, and remarks."""

    name: str
    attempts: list[Attempt]
    config: dict[str, str]
    metrics: Series
    speed: Series
    traces: list[Trace]
    written_at: datetime | None
    """When its logs were last written."""
    notes: list[str]

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the record says of the last attempt."""
        return self.attempts[-1].facts if self.attempts else {}

    @property
    def world_size(self) -> int:
        """Number of ranks of the last attempt; 1 if it is unknown."""
        layout = self.facts.get("layout")
        return _count(layout.get("world_size")) or 1 if isinstance(layout, Mapping) else 1


def read(directory: Path) -> Run:
    """Read a run directory."""
    notes: list[str] = []
    metrics, speed = (_series(directory / f"{name}.csv", notes) for name in ("metrics", "speed"))
    logs = [path for path in directory.glob("*.csv") if path.is_file()]
    return Run(
        name=str(directory),
        attempts=_attempts(directory / "run.json", notes),
        config=_config(directory / "config.yaml", notes),
        metrics=metrics,
        speed=speed,
        traces=read_traces(directory / "profile", notes),
        written_at=max((_time_of(path) for path in logs), default=None),
        notes=notes,
    )


def _series(path: Path, notes: list[str]) -> Series:
    """Values of a log; rows that are damaged are left out."""
    found: Series = {}
    damaged: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.reader(line.replace("\0", "") for line in file)
            for number, row in enumerate(itertools.islice(rows, 1, None), 2):
                try:
                    step, _, name, value = row
                    found.setdefault(name, []).append((int(step), float(value)))
                except ValueError:
                    damaged.append(number)
    except FileNotFoundError:
        notes.append(f"{path.name}: does not exist; the logger csv writes it")
    except (OSError, csv.Error) as error:
        notes.append(f"{path.name}: cannot be read to its end ({one_line(error)})")
    if damaged:
        lines = f"{len(damaged)} damaged row{'s' * (len(damaged) > 1)} left out"
        notes.append(f"{path.name}: {lines}, first in line {damaged[0]}")
    return found


def _attempts(path: Path, notes: list[str]) -> list[Attempt]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["attempts"]
        given = [_attempt(dict(each)) for each in found]
    except FileNotFoundError:
        notes.append("run.json: does not exist; attempts and environment are unknown")
    except (OSError, ValueError, LookupError, TypeError) as error:
        notes.append(f"run.json: cannot be read ({one_line(error)})")
    else:
        return given
    return []


def _attempt(facts: dict[str, Any]) -> Attempt:
    """Steps are also in the outcome, and in the name of the checkpoint that was resumed."""
    ended = str(facts.get("ended", "")).rpartition(" step ")[2]
    resumed = facts.get("resumed_from")
    start = str(resumed).rpartition("step-")[2] if resumed else "0"
    return Attempt(
        facts,
        started=_datetime(facts.get("started")),
        ended_at=_datetime(facts.get("ended_at")),
        first_step=_count(facts.get("first_step", start)),
        last_step=_count(facts.get("last_step", ended)),
    )


def _count(given: object) -> int | None:
    return int(str(given)) if str(given).isdecimal() else None


def _datetime(given: object) -> datetime | None:
    try:
        return datetime.strptime(str(given), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None


def _time_of(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime).astimezone()


def _config(path: Path, notes: list[str]) -> dict[str, str]:
    if not path.is_file():
        notes.append("config.yaml: does not exist; a run of the command line has one")
        return {}
    try:
        content = redaction.value(config_files.read_file(path.name, path))
    except ConfigurationError as error:
        notes.append(str(error))
        return {}
    return dict(_flat("", content))


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Values by dotted key; a list is one value."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(f"{prefix}.{key}".lstrip("."), each)
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value, default=str)
