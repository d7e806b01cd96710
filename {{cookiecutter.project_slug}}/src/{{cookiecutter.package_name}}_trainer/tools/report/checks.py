"""What makes a run slow: each cause with its measure and its threshold; silent where unknown."""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from .costs import Spent
from .reading import Run
from .traces import Trace

_DATA, _CHECKPOINT, _RANK, _IDLE, _BUSY = 0.20, 0.05, 0.20, 0.30, 90.0
_CHECKPOINT_GOAL = 0.02
_LEAST_SECONDS = 10.0
_FLOOR = f", and {_LEAST_SECONDS:.0f} s: less is not worth a change"
_NO_PROFILE = "not examined: no profile; train with the callback Profile"


@dataclass(frozen=True)
class Check:
    """One cause: what was measured, from where on it is reported, and what to do if it is."""

    cause: str
    measured: str
    threshold: str
    advice: str | None = None


def check(run: Run, spent: Spent) -> list[Check]:
    """Examine each cause."""
    checks: list[Callable[[Run, Spent], Check]] = [_loader, _checkpoints, _waits, _ranks, _batch]
    return [each(run, spent) for each in checks]


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def _loader(run: Run, spent: Spent) -> Check:
    cause = "Slow loader"
    threshold = (
        f"{_percent(_DATA)} of the steps' time: below, steps without any wait would be less than "
        f"{1 / (1 - _DATA):.2f} times as fast{_FLOOR}; not while the GPU is {_BUSY:.0f} % busy"
    )
    # The first row has the start of the workers.
    rows = run.speed.get("speed/data_wait", [])[1:]
    if not rows or not spent.steps_seconds:
        return Check(cause, "not examined: speed.csv has less than two logged steps", threshold)
    wait = statistics.fmean(value for _, value in rows)
    measured = f"steps waited {_percent(wait)} of their time for data"
    busy = [value for _, value in run.speed.get("system/gpu_percent", [])]
    if busy:
        measured += f"; the GPU was {statistics.median(busy):.0f} % busy"
    is_busy = bool(busy) and statistics.median(busy) >= _BUSY
    if wait < _DATA or spent.data < _LEAST_SECONDS or is_busy:
        return Check(cause, measured, threshold)
    workers = run.config.get("data.init_args.num_workers")
    advice = (
        f"Steps waited {_percent(wait)} of their time for data. Raise num_workers of the loader"
        f"{f' (now {workers})' if workers else ''}, or make a sample cheaper to read: decode and "
        f"resize once, before training. At most, training becomes {1 / (1 - wait):.1f} times as "
        "fast."
    )
    return Check(cause, measured, threshold, advice)


def _checkpoints(run: Run, spent: Spent) -> Check:
    cause = "Checkpoints too often"
    share_of = "the time of steps, validation and checkpoints"
    threshold = f"{_percent(_CHECKPOINT)} of {share_of}{_FLOOR}"
    if not spent.measured:
        return Check(cause, "not examined: speed.csv has no step", threshold)
    share = spent.checkpoint / spent.measured
    measured = f"saving took {_percent(share)} of the time ({spent.checkpoint:.1f} s)"
    if share < _CHECKPOINT or spent.checkpoint < _LEAST_SECONDS:
        return Check(cause, measured, threshold)
    advice = f"Saving checkpoints took {_percent(share)} of the time. "
    every = run.config.get("trainer.checkpoint_every_n_steps", "")
    if every.isdecimal():
        odds = spent.checkpoint / (spent.measured - spent.checkpoint)
        steps = round(int(every) * odds / _CHECKPOINT_GOAL)
        advice += (
            f"With checkpoint_every_n_steps {steps} instead of {every} it would be about "
            f"{_percent(_CHECKPOINT_GOAL)}. "
        )
    advice += "With async_checkpoints, steps go on while files are written."
    return Check(cause, measured, threshold, advice)


def _waits(run: Run, spent: Spent) -> Check:
    cause = "Step that waits for the device"
    threshold = (
        "a wait in every recorded step: then the host cannot launch ahead of the device. A "
        "checkpoint, a validation and the gradient scaler (one wait per optimizer) may wait"
    )
    if not run.traces:
        return Check(cause, _NO_PROFILE, threshold)
    if str(run.facts.get("device", "cpu")).startswith("cpu"):
        return Check(cause, "does not apply: on a CPU there is nothing to wait for", threshold)
    trace = run.traces[0]
    allowed = 1 if run.facts.get("precision") == "16-mixed" else 0
    fewest = min(each.waits for each in trace.steps)
    seconds = statistics.fmean(each.waited for each in trace.steps)
    many = f"{fewest} time{'s' * (fewest != 1)}"
    measured = f"rank {trace.rank} waits at least {many} in each step ({seconds * 1e3:.3g} ms)"
    if fewest <= allowed:
        return Check(cause, measured, threshold)
    places = Counter(place for each in trace.steps for place in each.places).most_common(3)
    where = f" Most are in {', '.join(place for place, _ in places)}." if places else ""
    hint = "" if places else " Profile with with_stack: true names the lines."
    advice = (
        f"The host waits for the device at least {many} in each step, "
        f"{seconds * 1e3:.3g} ms together.{where} Leave .item(), .cpu(), print of a tensor and "
        f"`if tensor:` out of the step, and log tensors as they are.{hint}"
    )
    return Check(cause, measured, threshold, advice)


def _ranks(run: Run, spent: Spent) -> Check:
    cause = "Slow rank"
    threshold = (
        f"{_percent(_RANK)} of a step: the same rank is that much longer busy than the median of "
        "the others, and the longest busy one in every recorded step"
    )
    if len(run.traces) < 2:
        ranks = "one rank trains"
        if run.world_size > 1:
            ranks = "fewer than two ranks have a profile; train with Profile, ranks: null"
        return Check(cause, f"not examined: {ranks}", threshold)
    slowest, delay, step = _slowest(run.traces)
    if slowest is None:
        return Check(cause, "no rank is the longest busy one in every step", threshold)
    measured = f"rank {slowest} is {delay * 1e3:.3g} ms of a step longer busy than the others"
    if delay < _RANK * step:
        return Check(cause, measured, threshold)
    advice = (
        f"The other ranks wait for rank {slowest} {delay * 1e3:.3g} ms in each step of "
        f"{step * 1e3:.3g} ms. Compare its machine and its data with those of the others: another "
        "load on the node, a slower GPU or disk, longer samples."
    )
    return Check(cause, measured, threshold, advice)


def _slowest(traces: list[Trace]) -> tuple[int | None, float, float]:
    """The rank that is busy longest in each step, by how many seconds, and seconds of a step."""
    busy = [
        [each.total - each.seconds["communication"] for each in trace.steps] for trace in traces
    ]
    longest = [max(range(len(busy)), key=column.__getitem__) for column in zip(*busy, strict=False)]
    step = statistics.fmean(trace.step_seconds for trace in traces)
    if len(set(longest)) != 1:
        return None, 0.0, step
    means = [statistics.fmean(each) for each in busy]
    others = [mean for index, mean in enumerate(means) if index != longest[0]]
    return traces[longest[0]].rank, means[longest[0]] - statistics.median(others), step


def _batch(run: Run, spent: Spent) -> Check:
    cause = "Small batch"
    threshold = (
        f"{_percent(_IDLE)} of a step in which there is no computation, data, copy, communication, "
        "checkpoint or validation: Python, and the launch of kernels, whose time does not depend "
        "on the size of the batch"
    )
    if not run.traces:
        return Check(cause, _NO_PROFILE, threshold)
    steps = run.traces[0].steps
    # Not the mean: another program may have interrupted one of the few steps.
    share = statistics.median(each.seconds["other"] / each.total for each in steps)
    measured = f"nothing is computed in {_percent(share)} of a step of rank {run.traces[0].rank}"
    if share < _IDLE:
        return Check(cause, measured, threshold)
    batch = run.facts.get("samples_per_step")
    advice = (
        f"Nothing is computed in {_percent(share)} of a step: Python and the launch of kernels "
        f"take it. Train with larger batches{f' (now {batch} samples a step)' if batch else ''}: "
        "find_batch_size says what fits. Otherwise try compile: true, and move Python code out of "
        "training_step."
    )
    return Check(cause, measured, threshold, advice)
