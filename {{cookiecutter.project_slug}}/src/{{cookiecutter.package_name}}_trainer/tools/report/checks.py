"""What makes a run slow: how each cause of ``causes.toml`` is measured; silent where unknown."""

import statistics
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from .reading import Run

_NO_PROFILE = "not examined: no profile; train with the callback Profile"

Finding = tuple[str, dict[str, Any] | None]
"""What was measured, and from the threshold on the values of the advice."""


class Check(NamedTuple):
    """One cause: what was measured, from where on it is reported, and what to do if it is."""

    cause: str
    threshold: str
    measured: str
    advice: str | None


def check(run: Run) -> list[Check]:
    causes = tomllib.loads(files(__package__).joinpath("causes.toml").read_text(encoding="utf-8"))
    checks = []
    for cause, limits in causes.items():
        measured, values = _MEASURES[cause](run, limits)
        advice = None if values is None else limits["advice"].format(**limits, **values)
        checks.append(Check(cause, limits["threshold"].format(**limits), measured, advice))
    return checks


def _loader(run: Run, limits: Mapping[str, Any]) -> Finding:
    # The first row has the start of the workers.
    if not (rows := [value for _, value in run.speed.get("speed/data_wait", [])[1:]]):
        return "not examined: speed.csv has less than two logged steps", None
    busy = statistics.median(value for _, value in run.speed.get("system/gpu_percent", [(0, 0.0)]))
    wait, waited = statistics.fmean(rows), run.spent.data
    measured = f"steps waited {wait:.2g} of their time for data, {waited:.3g} s"
    measured += f"; the GPU was {busy:.0f}% busy" if busy else ""
    if wait < limits["share"] or waited < limits["seconds"] or busy >= limits["busy"]:
        return measured, None
    workers = run.config.get("data.init_args.num_workers", "unknown")
    return measured, {"wait": wait, "workers": workers, "gain": 1 / max(1 - wait, 0.01)}


def _checkpoints(run: Run, limits: Mapping[str, Any]) -> Finding:
    spent = run.spent
    measured_time = spent.training + spent.data + spent.checkpoint + spent.validation
    share = spent.checkpoint / (measured_time or 1.0)
    measured = f"saving took {share:.2g} of the time, {spent.checkpoint:.3g} s"
    if share < limits["share"] or spent.checkpoint < limits["seconds"]:
        return measured, None
    every = run.config.get("trainer.checkpoint_every_n_steps", "")
    factor = share / max(1 - share, 0.01) / limits["goal"]
    change = f"checkpoints {factor:.0f} times less often"
    if every.isdecimal():
        change = f"checkpoint_every_n_steps {round(int(every) * factor)} instead of {every}"
    return measured, {"part": share, "change": change}


def _waits(run: Run, limits: Mapping[str, Any]) -> Finding:
    if not run.traces:
        return _NO_PROFILE, None
    if run.facts.get("device", "cpu").startswith("cpu"):
        return "does not apply: on a CPU there is nothing to wait for", None
    trace = run.traces[0]
    fewest = min(step.waits for step in trace.steps)
    waited = statistics.fmean(step.waited for step in trace.steps) * 1e3
    many = f"at least {fewest} time{'s' * (fewest != 1)} in each step, {waited:.3g} ms"
    is_scaled = run.facts.get("precision") == "16-mixed"
    most = limits["waits_with_16_mixed" if is_scaled else "waits"]
    return f"rank {trace.rank} waited {many}", {"many": many} if fewest >= most else None


def _ranks(run: Run, limits: Mapping[str, Any]) -> Finding:
    if run.facts.get("layout.world_size", "1") == "1":
        return "does not apply: one rank trains", None
    if len(run.traces) < 2:
        return "not examined: only with profiles of all ranks (Profile with ranks: null)", None
    busy = {t.rank: [s.total - s.seconds["communication"] for s in t.steps] for t in run.traces}
    ranks, steps = [*busy], zip(*busy.values(), strict=False)
    longest = {ranks[step.index(max(step))] for step in steps}
    if len(longest) != 1:
        return "no rank is busy longest in every step", None
    means, rank = {r: statistics.fmean(busy[r]) for r in ranks}, longest.pop()
    delay = means.pop(rank) - statistics.median(means.values())
    step = statistics.fmean(s.total for trace in run.traces for s in trace.steps)
    times = f"{delay * 1e3:.3g} of the {step * 1e3:.3g} ms"
    values = {"rank": rank, "times": times} if delay >= limits["share"] * step else None
    return f"rank {rank} is busy {times} longer than others", values


def _batch(run: Run, limits: Mapping[str, Any]) -> Finding:
    if not run.traces:
        return _NO_PROFILE, None
    # Not the mean: another program may have interrupted one of the few steps.
    share = statistics.median(step.seconds["other"] / step.total for step in run.traces[0].steps)
    values = {"part": share, "batch": run.facts.get("samples_per_step", "unknown")}
    measured = f"nothing was computed in {share:.2g} of a step of rank {run.traces[0].rank}"
    return measured, values if share >= limits["share"] else None


_MEASURES: dict[str, Callable[[Run, Mapping[str, Any]], Finding]] = {
    "Slow loader": _loader,
    "Checkpoints too often": _checkpoints,
    "Step that waits for the device": _waits,
    "Slow rank": _ranks,
    "Small batch": _batch,
}
