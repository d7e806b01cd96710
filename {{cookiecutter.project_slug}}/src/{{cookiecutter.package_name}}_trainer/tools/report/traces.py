"""Where the time of the recorded steps goes, from the traces of the callback ``Profile``."""

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import one_line

CATEGORIES = (
    *("data", "copy", "compute", "communication", "optimizer", "checkpoint", "validation"),
    "other",
)
"""``other``: the rest; Python, the launch of kernels, and waiting."""
# A moment belongs to the first of these that is active: communication counts only where nothing
# is computed meanwhile. On a GPU its own timeline counts, and the host's where it is idle.
_ON_CPU = ("checkpoint", "validation", "data", "optimizer", "compute", "communication")
_ON_GPU = (
    *("optimizer", "compute", "copy", "communication"),
    *("checkpoint", "validation", "data"),
)
_MOST_BYTES = 2**29
_STEP = re.compile(r"ProfilerStep#\d+")
_COMMUNICATION = re.compile(r"(gloo|nccl|c10d|mpi|horovod)(:|_|Dev|Kernel)", re.IGNORECASE)
_WAIT = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize")
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#")

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """One recorded step: seconds by category; number and seconds of its waits for the device."""

    seconds: dict[str, float]
    waits: int
    waited: float

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Trace:
    """The recorded steps of a rank."""

    rank: int
    steps: list[Step]

    def mean(self, category: str) -> float:
        """Mean seconds of a category in a step."""
        return sum(each.seconds[category] for each in self.steps) / len(self.steps)

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return sum(each.total for each in self.steps) / len(self.steps)


def read_traces(directory: Path, notes: list[str]) -> list[Trace]:
    """Read the newest trace of each rank, by rank; one that cannot be read is noted."""
    newest: dict[int, Path] = {}
    for path in sorted(directory.glob("rank-*.json*")):
        if found := re.match(r"rank-(\d+)\.", path.name):
            newest[int(found[1])] = path
    traces = []
    for rank, path in sorted(newest.items()):
        try:
            if steps := _steps(_events(path)):
                traces.append(Trace(rank, steps))
            else:
                notes.append(f"profile/{path.name}: no step was recorded")
        except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
            notes.append(f"profile/{path.name}: cannot be read ({one_line(error)})")
    return traces


def _events(path: Path) -> list[Event]:
    """Events of a trace that have a duration, in microseconds."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB; record fewer steps")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = json.load(file)["traceEvents"]
    return [each for each in events if each.get("ph") == "X"]


def _steps(events: Sequence[Event]) -> list[Step]:
    has_device = any(each.get("cat") == "kernel" for each in events)
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in CATEGORIES}
    for each in events:
        if (name := _category(each, has_device)) is not None:
            spans[name].append(_span(each))
    arrays = {name: np.array(found).reshape(-1, 2) for name, found in spans.items()}
    own = [each for each in events if _STEP.fullmatch(each["name"])]
    ranges = [each for each in own if each.get("cat") == "user_annotation"]
    ranges.sort(key=lambda each: each["ts"])
    order = _ON_GPU if has_device else _ON_CPU
    return [_step(events, _span(each), arrays, order) for each in ranges]


def _category(event: Event, has_device: bool) -> str | None:
    name, kind = event["name"], event.get("cat", "")
    if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
        if _COMMUNICATION.match(name):
            return "communication"
        return "copy" if kind == "gpu_memcpy" else "compute"
    if kind == "gpu_user_annotation":
        return "optimizer" if _OPTIMIZER.match(name) else None
    if name in ("trainer:checkpoint", "trainer:validation"):
        return str(name).removeprefix("trainer:")
    if name.startswith("enumerate(DataLoader)"):
        return "data"
    if has_device:
        return None
    if _OPTIMIZER.match(name):
        return "optimizer"
    if _COMMUNICATION.match(name):
        return "communication"
    # The engine's own events also wait for communication.
    is_operator = kind == "cpu_op" and not name.startswith("autograd::engine")
    return "compute" if is_operator else None


def _span(event: Event) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _step(
    events: Sequence[Event],
    window: tuple[float, float],
    spans: Mapping[str, Any],
    order: Sequence[str],
) -> Step:
    seconds, so_far, before = dict.fromkeys(CATEGORIES, 0.0), np.zeros((0, 2)), 0.0
    for name in order:
        so_far = np.concatenate([so_far, spans[name]])
        covered = _covered(so_far, window)
        seconds[name], before = covered - before, covered
    seconds["other"] = (window[1] - window[0]) / 1e6 - before
    # A checkpoint must wait for the device.
    paused = np.concatenate([spans["checkpoint"], spans["validation"]])
    waits = [
        each
        for each in events
        if _WAIT.match(each["name"]) and window[0] <= each["ts"] < window[1]
        if not any(first <= each["ts"] < last for first, last in paused)
    ]
    return Step(seconds, len(waits), sum(each["dur"] for each in waits) / 1e6)


def _covered(spans: Any, window: tuple[float, float]) -> float:
    """Seconds in a window that at least one of the spans covers."""
    inside = np.clip(spans, *window)
    inside = inside[np.argsort(inside[:, 0])]
    reached = np.maximum.accumulate(np.concatenate([[window[0]], inside[:-1, 1]]))
    return float(np.maximum(0, inside[:, 1] - np.maximum(inside[:, 0], reached)).sum()) / 1e6
