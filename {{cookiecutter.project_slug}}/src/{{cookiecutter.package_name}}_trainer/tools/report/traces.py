"""Where the time of the recorded steps goes, from the traces of the callback ``Profile``."""

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import one_line

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
CATEGORIES = (*_KNOWN, "other")
"""``other``: the rest; Python, the launch of kernels, and waiting."""
_MOMENTS = 1_000_000  # of a step
_MOST_BYTES = 2**29

Span = tuple[float, float]
"""Begin and end in microseconds."""


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


def read_traces(directory: Path, notes: list[str]) -> list[Trace]:
    """Read the newest trace of each rank, by rank; one that cannot be read is noted."""
    newest = {path.name.partition(".")[0]: path for path in sorted(directory.glob("rank-*.json*"))}
    traces = []
    for name, path in newest.items():
        try:
            if steps := _steps(path):
                traces.append(Trace(int(name.removeprefix("rank-")), steps))
            else:
                notes.append(f"profile/{path.name}: no step was recorded")
        except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
            notes.append(f"profile/{path.name}: cannot be read ({one_line(error)})")
    return traces


def _steps(path: Path) -> list[Step]:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES >> 20} MiB; record fewer steps")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = [each for each in json.load(file)["traceEvents"] if each.get("ph") == "X"]
    patterns = _ON_GPU if _spans(events, "kernel/") else _ON_CPU
    spans = {category: _spans(events, pattern) for category, pattern in patterns.items()}
    paused = spans["checkpoint"] + spans["validation"]  # which must wait for the device
    found = _spans(events, _WAIT)
    waits = [each for each in found if not any(a <= each[0] < b for a, b in paused)]
    return [_step(each, spans, waits) for each in sorted(_spans(events, _STEP))]


def _spans(events: Sequence[Mapping[str, Any]], pattern: str) -> list[Span]:
    matches = re.compile(pattern).match
    found = (each for each in events if matches(f"{each.get('cat', '')}/{each['name']}"))
    return [(float(each["ts"]), float(each["ts"]) + float(each["dur"])) for each in found]


def _step(window: Span, spans: Mapping[str, Sequence[Span]], waits: Sequence[Span]) -> Step:
    """Mark each moment of a step with its category, those that come first last."""
    begin, microseconds = window[0], max(window[1] - window[0], 1e-3)
    moments = np.full(_MOMENTS, CATEGORIES.index("other"), np.uint8)
    for category, found in reversed(list(spans.items())):
        places = (np.array(found).reshape(-1, 2) - begin) / microseconds * _MOMENTS
        for first, last in places.round().clip(0, _MOMENTS).astype(int).tolist():
            moments[first:last] = CATEGORIES.index(category)
    counts = np.bincount(moments, minlength=len(CATEGORIES)).tolist()
    seconds = [count / _MOMENTS * microseconds / 1e6 for count in counts]
    waited = [last - first for first, last in waits if window[0] <= first < window[1]]
    return Step(dict(zip(CATEGORIES, seconds, strict=True)), len(waited), sum(waited) / 1e6)
