"""What a run says of itself: what it is about to do, and what came of it."""

from pathlib import Path

from . import scaling
from .arguments import Arguments
from .feed import Feed
from .loop import FitLoop


def opening(checked: Arguments, feed: Feed, directory: Path) -> list[str]:
    """Strategy, effective batch size, steps, and where the run lies; a line each."""
    processes = checked.layout.world_size
    lines = [
        f"strategy {checked.strategy_name} on {checked.device.type}, precision "
        f"{checked.precision.name}, {processes} process{'es' * (processes > 1)}"
    ]
    replicas, accumulate = checked.strategy.data_replicas, feed.accumulate
    if feed.samples_per_step:
        each = feed.samples_per_step // (replicas * accumulate)
        parts = f"{each} a device, {replicas} replicas, {accumulate} accumulated"
        lines.append(f"effective batch size {feed.samples_per_step} ({parts})")
    total = scaling.total_steps(feed.steps, *checked.schedule.ends)
    lines.append(
        f"steps per epoch {feed.steps or 'unknown'}, epochs "
        f"{checked.schedule.max_epochs or 'until max_steps'}, steps in all {total or 'unknown'}"
    )
    return [*lines, f"run directory {directory}"]


def closing(loop: FitLoop, directory: Path) -> list[str]:
    """Steps made, the newest values, and where the run lies."""
    values = "  ".join(f"{name} {value:.4g}" for name, value in loop.outputs.latest.items())
    rate = f", {loop.samples_per_second:.0f} samples/s" if loop.samples_per_second else ""
    return [
        f"done after {loop.position.global_step} steps{rate}: {values}",
        f"the run lies in {directory}",
    ]
