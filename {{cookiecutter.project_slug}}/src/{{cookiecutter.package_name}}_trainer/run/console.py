"""What a run prints: its settings at the start, notes, and its results at the end."""

import contextlib
from pathlib import Path

import torch

from ..checkpoint import run_directory
from ..data.randomness import OWN_SEEDS
from ..launch import devices, output, reports
from ..loop.fit import FitLoop
from .plan import Plan


class Console:
    """Prints on the main rank only; ``is_command``: the command line has started the run."""

    def __init__(self, plan: Plan, is_command: bool) -> None:
        self.is_command, self._plan = is_command, plan
        self._is_main, self._shows_progress = plan.layout.is_main, plan.options.enable_progress_bar

    def say(self, *lines: str) -> None:
        """Print lines if progress is shown."""
        if lines and self._is_main and self._shows_progress:
            output.print_lines(*lines)

    def note(self, *lines: str, on_each_rank: bool = False) -> None:
        """Print lines to stderr, also if no progress is shown: what a user may not expect."""
        if lines and (self._is_main or on_each_rank):  # others into their logs
            output.print_lines(*(f"note: {line}" for line in lines), error=True)

    def begin(self, loop: FitLoop, total_steps: int | None, directory: Path) -> None:
        """Print what a fit will do, and where; a command prints that even without progress."""
        self.say(*_settings(self._plan, loop, total_steps))
        if self._is_main and (self._shows_progress or self.is_command):
            output.print_lines(f"run directory: {self._plan.shown(directory)}")

    def end(self, loop: FitLoop, directory: Path) -> None:
        """Print number of steps, latest values and run directory of a fit."""
        fit, latest = loop.fit, loop.fit.outputs.latest
        if fit.position.is_stopped and fit.position.is_out_of_time(fit.options):
            self.note(f"training stops after step {fit.position.global_step}: max_time")
        shown = {  # a value of the epoch only once
            name: value
            for name, value in latest.items()
            if not name.endswith("_epoch") or latest.get(name.removesuffix("_epoch")) != value
        }
        values = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
        values += "".join(callback.best_value(fit.feed.steps) for callback in self._plan.callbacks)
        rate = f", {loop.samples_per_second:.0f} samples/s" if loop.samples_per_second else ""
        self.say(
            f"done after {fit.position.global_step} steps{rate}: {values}",
            f"run directory: {self._plan.shown(directory)}",
        )

    def output_of(self, directory: Path) -> contextlib.AbstractContextManager[None]:
        """Send the output of other ranks than the main one into the run directory."""
        log = directory / "logs" / f"rank-{self._plan.layout.rank}.log"
        return contextlib.nullcontext() if self._is_main else run_directory.output_to(log)


def warn_of_unused(plan: Plan) -> None:
    """Warn once if the run uses no GPU only because torch cannot, or not the program's seed."""
    if not plan.layout.is_main or reports.is_reported():  # our launcher has printed it
        return
    is_on_cpu = plan.options.accelerator == "auto" and plan.device.type == "cpu"
    if is_on_cpu and (line := devices.why_hidden()) is not None:
        output.print_once(f"warning: this run is on the CPU: {line}")
    seed = torch.initial_seed()  # before a program sets one, a random number of 64 bits
    if plan.options.seed == 0 and seed not in OWN_SEEDS and seed < 2**32:
        used = "note: seed=0 is used, not that of torch.manual_seed({0}): give Trainer(seed={0})"
        output.print_once(used.format(seed))


def _settings(plan: Plan, loop: FitLoop, total_steps: int | None) -> list[str]:
    """Strategy, effective batch size and steps, one line each."""
    feed, options, processes = loop.fit.feed, plan.options, plan.layout.world_size
    lines = [
        f"strategy {plan.strategy_name} on {plan.device.type}, precision "
        f"{plan.precision.name}, {processes} process{'es' * (processes > 1)}"
    ]
    if options.compile:
        lines.append("compile: the first step compiles the model, which may take minutes")
    lines += devices.precision_notes(plan.device.type, plan.precision.name)
    if feed.samples_per_step:
        replicas, accumulate, num = plan.strategy.data.replicas, feed.accumulate, len(plan.devices)
        reader = "device" if num == 1 else f"process of {num} devices"
        lines.append(
            f"effective batch size {feed.samples_per_step} "
            f"({feed.samples_per_step // (replicas * accumulate)} per {reader}, {replicas} "
            f"replica{'s' * (replicas > 1)}, {accumulate} accumulated)"
        )
    if loop.rate_factor is not None:
        warmup = options.learning_rate_warmup_steps
        reached = f", reached after {warmup} steps" if warmup else ""
        lines.append(f"learning rates times {loop.rate_factor(warmup):g}{reached}")
    end = "max_time" if options.max_steps is None else "max_steps"
    lines.append(
        f"steps per epoch {feed.steps or 'unknown'}, epochs "
        f"{options.max_epochs or f'until {end}'}, total steps {total_steps or 'unknown'}"
    )
    return lines
