"""What a run says of itself: what it is about to do, and what came of it."""

from pathlib import Path

from ..data import scaling
from ..launch.devices import gpu_backends
from ..loop.fit import FitLoop
from .plan import Arguments


def opening(checked: Arguments, loop: FitLoop) -> list[str]:
    """Strategy, effective batch size and steps; a line each."""
    feed, processes = loop.feed, checked.layout.world_size
    lines = [
        f"strategy {checked.strategy_name} on {checked.device.type}, precision "
        f"{checked.precision.name}, {processes} process{'es' * (processes > 1)}"
    ]
    lines += gpu_backends.notes(checked.device.type, checked.precision.name)
    replicas, accumulate = checked.strategy.data_replicas, feed.accumulate
    if feed.samples_per_step:
        each = feed.samples_per_step // (replicas * accumulate)
        parts = f"{each} a {_reader(checked)}, {replicas} replicas, {accumulate} accumulated"
        lines.append(f"effective batch size {feed.samples_per_step} ({parts})")
    factor = loop.rate(checked.learning_rate.warmup_steps)
    if factor != 1.0:
        lines.append(f"learning rates times {factor:g}{_warm_up(checked)}")
    total = scaling.total_steps(feed.steps, *checked.schedule.ends)
    lines.append(
        f"steps per epoch {feed.steps or 'unknown'}, epochs "
        f"{checked.schedule.max_epochs or 'until max_steps'}, steps in all {total or 'unknown'}"
    )
    return lines


def where(directory: Path) -> str:
    """The line that says where the run is written."""
    return f"run directory: {directory}"


def _reader(checked: Arguments) -> str:
    """What reads a replica's batches: a device, or all of a node's together."""
    return "device" if len(checked.devices) == 1 else f"process of {len(checked.devices)} devices"


def _warm_up(checked: Arguments) -> str:
    steps = checked.learning_rate.warmup_steps
    return f", reached after {steps} steps" if steps else ""


def closing(loop: FitLoop, directory: Path) -> list[str]:
    """Steps made, the newest values, and the run directory."""
    values = "  ".join(f"{name} {value:.4g}" for name, value in loop.outputs.latest.items())
    rate = f", {loop.samples_per_second:.0f} samples/s" if loop.samples_per_second else ""
    return [
        f"done after {loop.position.global_step} steps{rate}: {values}",
        where(directory),
    ]
