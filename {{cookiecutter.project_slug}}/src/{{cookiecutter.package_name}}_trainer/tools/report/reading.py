"""What a run directory says of a run; what is missing or damaged is said in words, not raised."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...checkpoint import run_directory
from ...cli import config_files
from ...errors import ConfigurationError, one_line
from ...launch import files
from ...logging.loggers import read_rows
from ...logging.remote_loggers import flat
from ...options import redaction

Series = dict[str, list[tuple[int, float]]]  # by name: the step, counted from 1, and the value
# The events of a category: a pattern of "kind/name". A moment belongs to the first category that
# is active: communication counts only where nothing is computed meanwhile. On a GPU its own
# timeline counts, and the host's where it is idle.
_COMMUNICATION = r"(?i:(gloo|nccl|c10d|mpi)(:|_|Dev|Kernel))"
_OPTIMIZER = r"user_annotation/Optimizer\.(step|zero_grad)#"
_HOST = {
    "checkpoint": "user_annotation/trainer:checkpoint$",
    "validation": "user_annotation/trainer:validation$",
    "data": r"user_annotation/enumerate\(DataLoader\)",
}
_ON_CPU = _HOST | {
    "optimizer": _OPTIMIZER,
    # The engine's own events also wait for communication.
    "compute": rf"cpu_op/(?!autograd::engine|{_COMMUNICATION})",
    "communication": rf"\w*/{_COMMUNICATION}",
}
_ON_GPU = {
    "optimizer": f"gpu_{_OPTIMIZER}",
    "compute": rf"(kernel|gpu_memset)/(?!{_COMMUNICATION})",
    "copy": rf"gpu_memcpy/(?!{_COMMUNICATION})",
    "communication": rf"(kernel|gpu_memset|gpu_memcpy)/{_COMMUNICATION}",
    **_HOST,
}
_STEP = r"user_annotation/ProfilerStep#\d+$"
_WAIT = r"\w*/(cuda|hip)(Stream|Device|Event)Synchronize"
_KNOWN = ("data", "copy", "compute", "communication", "optimizer", "checkpoint", "validation")
CATEGORIES = (*_KNOWN, "other")  # ``other``: the rest; Python, the launch of kernels, and waiting
_MOMENTS = 1_000_000  # of a step
_MOST_BYTES, _MOST_WORK = 2**27, 10**8  # of a trace; steps times spans

Span = tuple[float, float]  # begin and end in microseconds


class Step(NamedTuple):
    """One recorded step: seconds by category; number and seconds of its waits for the device."""

    seconds: dict[str, float]
    waits: int
    waited: float

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())


class Trace(NamedTuple):
    """The recorded steps of a rank."""

    rank: int
    steps: list[Step]


class Spent(NamedTuple):
    """Seconds since the first start, by what they were spent on."""

    training: float  # the steps that count, without their waits for ``data``
    data: float
    checkpoint: float
    validation: float
    repeated: float  # steps that a restart has lost
    between: float  # from the end of an attempt to the next one
    other: float  # start-up, and what is not measured, such as what follows the last logged step

    @property
    def wall(self) -> float:
        """All seconds."""
        return float(sum(self))

    @property
    def effective(self) -> float:
        """Effective training time: share of the wall time that trained steps that count."""
        return (self.training + self.data) / (self.wall or 1.0)


class Run(NamedTuple):
    """A run, as its directory describes it."""

    name: str
    attempts: list[dict[str, Any]]  # of ``run.json``, the first one first
    facts: dict[str, str]  # what it says of the last one, by dotted key
    config: dict[str, str]  # options of ``config.yaml``, likewise
    metrics: Series
    speed: Series
    traces: list[Trace]
    written_at: float | None  # when its logs were last written, in seconds since 1970
    notes: list[str]  # what is missing or damaged

    @property
    def restarts(self) -> list[tuple[float | None, int | None]]:
        """For each restart: seconds since the attempt before, and its steps that were lost."""
        restarts = []
        for before, after in pairwise(self.attempts):
            ended, started = _time(before, "ended_at"), _time(after, "started")
            last, first = _step(before, "last_step"), _step(after, "first_step")
            gap = None if ended is None or started is None else max(0.0, started - ended)
            restarts.append((gap, None if last is None or first is None else max(0, last - first)))
        return restarts

    @property
    def spent(self) -> Spent:
        """Where its time went, by its logs and attempts."""
        attempts = self.attempts or [{}]
        speed: Series = defaultdict(list)
        for name, points in self.speed.items():  # without values that no run has
            speed[name] = [(step, value) for step, value in points if value < 1e6]
        waits = dict(speed["speed/data_wait"])
        first = last = _step(attempts[0], "first_step") or 0
        steps = data = 0.0
        for step, duration in sorted(dict(speed["speed/seconds_per_step"]).items()):
            seconds, last = duration * max(0, step - last), max(step, last)
            steps, data = steps + seconds, data + seconds * waits.get(step, 0.0)
        checkpoint = sum(value for _, value in speed["speed/checkpoint_seconds"])
        validation = sum(value for _, value in speed["speed/validation_seconds"])
        lost = sum(lost or 0 for _, lost in self.restarts) * steps / max(1, last - first)
        between = sum(gap or 0.0 for gap, _ in self.restarts)
        start, end = _time(attempts[0], "started"), _time(attempts[-1], "ended_at")
        wall = (end or self.written_at or start) - start if start else 0.0
        # Times of day are whole seconds, so a short run may seem shorter than its steps.
        other = max(0.0, wall - (steps + checkpoint + validation + lost + between))
        return Spent(steps - data, data, checkpoint, validation, lost, between, other)


def _step(attempt: Mapping[str, Any], name: str) -> int | None:
    value = attempt.get(name)
    return value if isinstance(value, int) and abs(value) < 2**53 else None


def _time(attempt: Mapping[str, Any], name: str) -> float | None:
    try:
        return datetime.strptime(str(attempt.get(name)), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def read(directory: Path, name: str = "") -> Run:
    """Read a run directory; ``name``: how the page calls it."""
    notes: list[str] = []
    metrics, speed = (_series(directory / f"{log}.csv", notes) for log in ("metrics", "speed"))
    attempts, damage = run_directory.read_record(directory)
    if damage is not None:
        notes.append(damage)
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
        traces=_traces(directory / "profile", notes),
        written_at=max((path.lstat().st_mtime for path in directory.glob("*.csv")), default=None),
        notes=notes,
    )


def _series(path: Path, notes: list[str]) -> Series:
    series: Series = {}
    for step, _, name, value in read_rows(path, notes):
        series.setdefault(name, []).append((step, float(value)))
    return series


def _traces(directory: Path, notes: list[str]) -> list[Trace]:
    """Read the newest trace of each rank, by rank; one that cannot be read is noted."""
    newest = {path.name.partition(".")[0]: path for path in sorted(directory.glob("rank-*.json*"))}
    traces = []
    for name, path in newest.items():
        try:
            if steps := _recorded(path):
                traces.append(Trace(int(name.removeprefix("rank-")), steps))
            else:
                notes.append(f"profile/{path.name}: no step was recorded")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            notes.append(f"profile/{path.name}: cannot be read ({one_line(error)})")
    return traces


def _recorded(path: Path) -> list[Step]:
    events = [e for e in files.read_json(path, _MOST_BYTES)["traceEvents"] if e.get("ph") == "X"]
    patterns = _ON_GPU if _spans(events, "kernel/") else _ON_CPU
    spans = {category: _spans(events, pattern) for category, pattern in patterns.items()}
    paused = spans["checkpoint"] + spans["validation"]  # which must wait for the device
    waits = [span for span in _spans(events, _WAIT) if not any(a <= span[0] < b for a, b in paused)]
    steps = sorted(_spans(events, _STEP))
    if len(steps) * (_MOMENTS // 100 + sum(map(len, spans.values()))) > _MOST_WORK:
        raise ValueError(f"{len(steps)} steps with {len(events)} events; record fewer steps")
    return [_divided(step, spans, waits) for step in steps]


def _spans(events: Sequence[Mapping[str, Any]], pattern: str) -> list[Span]:
    matches = re.compile(pattern).match
    matching = (event for event in events if matches(f"{event.get('cat', '')}/{event['name']}"))
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in matching]
    if not all(0 <= time < 2**60 for span in spans for time in span):
        raise ValueError("has an event at no time")
    return spans


def _divided(window: Span, spans: Mapping[str, Sequence[Span]], waits: Sequence[Span]) -> Step:
    """Mark each moment of a step with its category, those that come first last."""
    begin, microseconds = window[0], max(window[1] - window[0], 1e-3)
    moments = np.full(_MOMENTS, CATEGORIES.index("other"), np.uint8)
    for category, pairs in reversed(list(spans.items())):
        places = (np.array(pairs).reshape(-1, 2) - begin) / microseconds * _MOMENTS
        for first, last in places.round().clip(0, _MOMENTS).astype(int).tolist():
            moments[first:last] = CATEGORIES.index(category)
    counts = np.bincount(moments, minlength=len(CATEGORIES)).tolist()
    seconds = [count / _MOMENTS * microseconds / 1e6 for count in counts]
    waited = [last - first for first, last in waits if window[0] <= first < window[1]]
    return Step(dict(zip(CATEGORIES, seconds, strict=True)), len(waited), sum(waited) / 1e6)
