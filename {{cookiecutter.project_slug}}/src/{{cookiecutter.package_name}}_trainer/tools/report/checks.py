"""What makes a run slow: each cause with its measure and its threshold; silent where unknown."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from .costs import Spent
from .reading import Run
from .traces import Trace

_DATA, _CHECKPOINT, _CHECKPOINT_GOAL, _RANK, _IDLE = 0.20, 0.05, 0.02, 0.20, 0.30
_BUSY, _LEAST_SECONDS = 90.0, 10.0
_NO_PROFILE = "not examined: no profile; train with the callback Profile"

Finding = tuple[str, str | None]
"""What was measured, and what to do if that is beyond the threshold."""


@dataclass(frozen=True)
class Check:
    """One cause: what was measured, from where on it is reported, and what to do if it is."""

    cause: str
    threshold: str
    measured: str
    advice: str | None


def check(run: Run, spent: Spent) -> list[Check]:
    """Examine each cause."""
    return [Check(cause, threshold, *find(run, spent)) for cause, threshold, find in _CAUSES]


def _loader(run: Run, spent: Spent) -> Finding:
    # The first row has the start of the workers.
    rows = [value for _, value in run.speed.get("speed/data_wait", [])[1:]]
    if not rows:
        return "not examined: speed.csv has less than two logged steps", None
    wait, busy = statistics.fmean(rows), [v for _, v in run.speed.get("system/gpu_percent", [])]
    measured = f"steps waited {wait:.2g} of their time for data, {spent.data:.3g} s"
    if busy:
        measured += f"; the GPU was {statistics.median(busy):.0f} % busy"
    is_busy = bool(busy) and statistics.median(busy) >= _BUSY
    if wait < _DATA or spent.data < _LEAST_SECONDS or is_busy:
        return measured, None
    workers = run.config.get("data.init_args.num_workers")
    return measured, (
        f"Steps waited {wait:.0%} of their time for data. Raise num_workers of the loader"
        f"{f' (now {workers})' if workers else ''}, or make a sample cheaper to read: decode and "
        f"resize once, before training. Steps become at most {1 / (1 - wait):.1f} times as fast."
    )


def _checkpoints(run: Run, spent: Spent) -> Finding:
    if not spent.measured:
        return "not examined: speed.csv has no step", None
    share = spent.checkpoint / spent.measured
    measured = f"saving took {share:.2g} of the time, {spent.checkpoint:.3g} s"
    if share < _CHECKPOINT or spent.checkpoint < _LEAST_SECONDS:
        return measured, None
    advice = f"Saving checkpoints took {share:.0%} of the time. "
    every = run.config.get("trainer.checkpoint_every_n_steps", "")
    if every.isdecimal():
        odds = spent.checkpoint / (spent.measured - spent.checkpoint)
        steps = round(int(every) * odds / _CHECKPOINT_GOAL)
        advice += f"With checkpoint_every_n_steps {steps} instead of {every} it would be about "
        advice += f"{_CHECKPOINT_GOAL:.0%}. "
    return measured, f"{advice}With async_checkpoints, steps go on while files are written."


def _waits(run: Run, spent: Spent) -> Finding:
    if not run.traces:
        return _NO_PROFILE, None
    if str(run.facts.get("device", "cpu")).startswith("cpu"):
        return "does not apply: on a CPU there is nothing to wait for", None
    steps = run.traces[0].steps
    fewest, waited = min(each.waits for each in steps), statistics.fmean(e.waited for e in steps)
    many = f"at least {fewest} time{'s' * (fewest != 1)} in each step, {waited * 1e3:.3g} ms"
    measured = f"rank {run.traces[0].rank} waited {many}"
    if fewest <= (run.facts.get("precision") == "16-mixed"):
        return measured, None
    return measured, (
        f"The host waits for the device {many} together. Leave .item(), .cpu(), print of a tensor "
        "and `if tensor:` out of the step, and log tensors as they are. Profile with with_stack: "
        "true records the lines in its trace."
    )


def _ranks(run: Run, spent: Spent) -> Finding:
    if run.world_size < 2:
        return "does not apply: one rank trains", None
    if len(run.traces) < 2:
        return "not examined: only with profiles of all ranks (Profile with ranks: null)", None
    slowest, delay, step = _slowest(run.traces)
    if slowest is None:
        return "no rank is busy longest in every step", None
    measured = f"rank {slowest} is busy {delay * 1e3:.3g} of {step * 1e3:.3g} ms longer than others"
    if delay < _RANK * step:
        return measured, None
    return measured, (
        f"The other ranks wait for rank {slowest}: {delay * 1e3:.3g} of the {step * 1e3:.3g} ms of "
        "a step. Compare its machine and its data with theirs: another load on the node, a slower "
        "GPU or disk, longer samples."
    )


def _slowest(traces: list[Trace]) -> tuple[int | None, float, float]:
    """The rank that is busy longest in each step, by how many seconds, and seconds of a step."""
    busy = [
        [each.total - each.seconds["communication"] for each in trace.steps] for trace in traces
    ]
    longest = {max(range(len(busy)), key=column.__getitem__) for column in zip(*busy, strict=False)}
    step = statistics.fmean(trace.step_seconds for trace in traces)
    if len(longest) != 1:
        return None, 0.0, step
    means, index = [statistics.fmean(each) for each in busy], longest.pop()
    return traces[index].rank, means.pop(index) - statistics.median(means), step


def _batch(run: Run, spent: Spent) -> Finding:
    if not run.traces:
        return _NO_PROFILE, None
    # Not the mean: another program may have interrupted one of the few steps.
    share = statistics.median(each.seconds["other"] / each.total for each in run.traces[0].steps)
    measured = f"nothing was computed in {share:.2g} of a step of rank {run.traces[0].rank}"
    if share < _IDLE:
        return measured, None
    batch = run.facts.get("samples_per_step")
    return measured, (
        f"Nothing is computed in {share:.0%} of a step: Python and the launch of kernels take it. "
        f"Train with larger batches{f' (now {batch} samples a step)' if batch else ''}: "
        "find_batch_size says what fits. Otherwise try compile: true, and move Python code out of "
        "training_step."
    )


_FLOOR = f"and {_LEAST_SECONDS:.0f} s in all: less is not worth a change"
_CAUSES: list[tuple[str, str, Callable[[Run, Spent], Finding]]] = [
    (
        "Slow loader",
        f"{_DATA} of the time of steps (without waits they would be {1 / (1 - _DATA):.2f} times as "
        f"fast) {_FLOOR}; not while the GPU is at least {_BUSY:.0f} % busy",
        _loader,
    ),
    (
        "Checkpoints too often",
        f"{_CHECKPOINT} of the time of steps, validation and checkpoints {_FLOOR}",
        _checkpoints,
    ),
    (
        "Step that waits for the device",
        "a wait in every recorded step, outside of checkpoints and validations: it keeps the host "
        "from launching ahead of the device. With 16-mixed two: the gradient scaler waits once",
        _waits,
    ),
    (
        "Slow rank",
        f"{_RANK} of a step that the same rank, in every recorded step, is busy longer than the "
        "median of the others",
        _ranks,
    ),
    (
        "Small batch",
        f"{_IDLE} of a step without computation, data, copies, communication or a checkpoint: "
        "Python and the launch of kernels, whose time does not depend on the size of the batch",
        _batch,
    ),
]
