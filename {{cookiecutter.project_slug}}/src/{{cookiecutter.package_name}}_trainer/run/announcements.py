"""Messages of a run: its settings at the start, and its results at the end."""

from pathlib import Path

from .. import launch
from ..data import scaling
from ..launch import devices
from ..loop import FitLoop
from .plan import Plan


def warn_of_hidden_gpus(plan: Plan) -> None:
    """Warn once if the run is on the CPU only because torch cannot use this machine's GPUs."""
    # Our launcher has printed it for its ranks.
    is_ours_to_say = plan.layout.is_main and not launch.is_reported()
    if is_ours_to_say and plan.options.accelerator == "auto" and plan.device.type == "cpu":
        devices.warn_of_hidden()


def opening(plan: Plan, loop: FitLoop) -> list[str]:
    """Strategy, effective batch size and steps, one line each."""
    feed, processes = loop.fit.feed, plan.layout.world_size
    lines = [
        f"strategy {plan.strategy_name} on {plan.device.type}, precision "
        f"{plan.precision.name}, {processes} process{'es' * (processes > 1)}"
    ]
    if plan.options.compile:
        lines.append("compile: the first step compiles the model, which may take minutes")
    lines += devices.precision_notes(plan.device.type, plan.precision.name)
    replicas, accumulate = plan.strategy.data_replicas, feed.accumulate
    if feed.samples_per_step:
        each = feed.samples_per_step // (replicas * accumulate)
        readers = f"{replicas} replica{'s' * (replicas > 1)}"
        parts = f"{each} per {_reader(plan)}, {readers}, {accumulate} accumulated"
        lines.append(f"effective batch size {feed.samples_per_step} ({parts})")
    factor = loop.rate_factor(plan.learning_rate.warmup_steps)
    if factor != 1.0:
        lines.append(f"learning rates times {factor:g}{_warm_up(plan)}")
    epochs, steps = plan.options.max_epochs, plan.options.max_steps
    total = scaling.total_steps(feed.steps, epochs, steps, loop.fit.position.extra_steps)
    lines.append(
        f"steps per epoch {feed.steps or 'unknown'}, epochs "
        f"{epochs or _end(plan)}, total steps {total or 'unknown'}"
    )
    return lines


def _end(plan: Plan) -> str:
    return "until max_time" if plan.options.max_steps is None else "until max_steps"


def where(directory: Path) -> str:
    """The line with the run directory."""
    return f"run directory: {directory}"


def _reader(plan: Plan) -> str:
    """What reads the batches of a replica: a device, or a process with several devices."""
    return "device" if len(plan.devices) == 1 else f"process of {len(plan.devices)} devices"


def _warm_up(plan: Plan) -> str:
    steps = plan.learning_rate.warmup_steps
    return f", reached after {steps} steps" if steps else ""


def early_end(loop: FitLoop) -> list[str]:
    """The line that says that time has run out."""
    fit = loop.fit
    is_late = fit.position.is_stopped and fit.position.is_out_of_time(fit.options)
    return [f"training stops after step {fit.position.global_step}: max_time"] if is_late else []


def closing(loop: FitLoop, directory: Path) -> list[str]:
    """Number of steps, latest values, and run directory."""
    latest = loop.fit.outputs.latest
    shown = {  # a value of the epoch only once
        name: value
        for name, value in latest.items()
        if not name.endswith("_epoch") or latest.get(name.removesuffix("_epoch")) != value
    }
    values = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
    rate = f", {loop.samples_per_second:.0f} samples/s" if loop.samples_per_second else ""
    return [
        f"done after {loop.fit.position.global_step} steps{rate}: {values}",
        where(directory),
    ]
