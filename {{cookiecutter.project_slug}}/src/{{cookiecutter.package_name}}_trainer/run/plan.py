"""The plan of a run: its options, checked before any process starts, and what follows from them.

Each concern checks its own options; here all errors are collected and raised at once. No check
changes global state: environment variables are set where a run starts (``trainer.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..callbacks import Callback, create_callbacks, problems_of_manual
from ..checkpoint import Request, run_choice
from ..data import scaling, sources
from ..errors import Problems
from ..launch import cluster, files
from ..launch.cluster import Layout
from ..logging import Logger, create_loggers
from ..loop import LearningRateScaling, compilation, trials
from ..loop.problems import problems_of
from ..memory import activation_checkpointing
from ..module import (
    Hooks,
    StageHooks,
    TrainingModule,
    is_overridden,
    problems_of_names,
    problems_of_signatures,
)
from ..options import Options, checks, reading
from ..strategies import Strategy
from ..strategies.precision import Precision
from . import (
    device_choice,
    effects,
    environment,
    initial_weights,
    placement,
    strategy_choice,
)
from .placement import Placement


@dataclass(frozen=True)
class Plan:
    """The plan of a run, after all checks.

    ``node_devices``: devices of all processes of this node; ``started_in``: the working directory
    when the trainer was created, because user code may change it: relative paths refer to it;
    ``notes``: lines to print at the start.
    """

    options: Options
    layout: Layout
    node_devices: tuple[torch.device, ...]
    strategy_name: str
    strategy: Strategy
    precision: Precision
    learning_rate: LearningRateScaling
    request: Request
    started_in: Path
    callbacks: tuple[Callback, ...]
    loggers: Mapping[str, Logger]
    notes: Sequence[str] = ()

    @property
    def local_processes(self) -> int:
        """Number of processes per node."""
        return self.strategy.local_processes(len(self.node_devices))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of this process: all of its node's if it is the only one there, or its own."""
        if self.local_processes == 1:
            return self.node_devices
        return (self.node_devices[self.layout.local_rank],)

    @property
    def device(self) -> torch.device:
        """This process' only device, or the first."""
        return self.devices[0]

    def placed(self) -> "Plan":
        """The plan in a process that a launcher has started since."""
        return replace(self, layout=cluster.detect())

    def shown(self, path: Path) -> Path:
        """A path as the user would write it in the directory where the program was started."""
        return files.shown(path, self.started_in)


def make(given: Options, problems: Problems) -> Plan:
    """Check the options of a trainer, and plan its run.

    Args:
        given: The options.
        problems: Has the lines of errors that were found when they were read.

    Raises:
        ConfigurationError: One line per error.
    """
    options, notes = reading.shortened(given, problems)
    where = placement.find(options, problems)
    name, strategy = strategy_choice.choose(options, where, problems)
    is_placed = not problems.lines
    _check_options(options, where, problems)
    callbacks = create_callbacks(options.callbacks, problems)
    loggers = create_loggers(options.loggers, problems)
    for logger in loggers.values():
        problems.lines += problems_of_signatures(logger, Logger)
    problems.lines += placement.check(options, where, name, strategy)
    learning_rate = LearningRateScaling()
    with problems:
        learning_rate = LearningRateScaling.of(options)
    if is_placed:
        effects.check_planned(options, where.accelerator, strategy, problems)
    asked = strategy_choice.asked(options, where, callbacks)
    problems.lines += strategy.limits.problems(name, asked)
    if options.log_gradient_norm and not strategy.steps_together:
        problems.add(
            f"strategy={name!r} does not support log_gradient_norm: its ranks do not average "
            "gradients in each step; leave it out"
        )
    if "compile" not in strategy.limits.refused:
        with problems:
            compilation.check_compiler(options.compile)
    with problems:
        problems.lines += strategy.problems(options)
    precision = Precision("32-true", where.accelerator)
    with problems:
        precision = Precision(str(options.precision), where.accelerator)
    if is_placed:
        with problems:
            strategy.check_processes(strategy.local_processes(len(where.devices)) * where.nodes)
            _check_batch(options, strategy.replicas(len(where.devices), where.nodes))
    problems.raise_any()
    return Plan(
        options=options,
        layout=where.layout,
        node_devices=tuple(
            device_choice.torch_device(where.accelerator, index) for index in where.devices
        ),
        strategy_name=name,
        strategy=strategy,
        precision=precision,
        learning_rate=learning_rate,
        request=Request.of(options),
        started_in=Path.cwd(),
        callbacks=callbacks,
        loggers=loggers,
        notes=[*notes, *checks.notes(options)],
    )


def _check_options(options: Options, where: Placement, problems: Problems) -> None:
    """Check what does not depend on the strategy; ``problems`` collects one line per error."""
    with problems:
        environment.check(several=max(len(where.devices), where.layout.world_size) > 1)
    checks.check(options, problems)
    compilation.check(options.compile, problems)
    with problems:
        activation_checkpointing.check_names(options.activation_checkpointing)
    run_choice.check(options, where.layout, problems)
    initial_weights.check(options, problems)


def _check_batch(options: Options, replicas: int) -> None:
    batch, accumulate = options.global_batch_size, options.accumulate_grad_batches
    if batch is not None and accumulate > 0:
        scaling.device_batch_size(batch, replicas, accumulate)


def check_module(plan: Plan, module: TrainingModule) -> None:
    """Check what only training needs, and whether a module fits the strategy and the options.

    Raises:
        ConfigurationError: One line per error.
    """
    problems, options, strategy = Problems(), plan.options, plan.strategy
    if (options.max_epochs, options.max_steps, options.max_time) == (None, None, None):
        problems.add("neither max_epochs nor max_steps is given: training would not end")
    needed = ["training_step", "configure_optimizers"][: 1 + strategy.needs_optimizers]
    problems.lines += sources.missing(module, needed)
    problems.lines += problems_of(module, plan.strategy_name, strategy, options)
    if not is_overridden(module, StageHooks, "setup"):  # otherwise after it: it may create layers
        _check_layers(plan, module, problems)
    problems.lines += problems_of_names(type(module), TrainingModule) + problems_of_signatures(
        module, Hooks
    )
    problems.lines += problems_of_signatures(module, StageHooks)
    if not module.automatic_optimization:
        problems.lines += problems_of_manual(plan.callbacks, module)
    if not plan.layout.started_outside:  # otherwise rank 0 checks this before it writes
        with problems:
            run_choice.refuse_existing(plan.request)
    problems.raise_any()


def check_sweep(plan: Plan, module: TrainingModule) -> None:
    """Check whether learning rates can be tried.

    Raises:
        ConfigurationError: One line per error.
    """
    problems = Problems()
    problems.lines += trials.problems_of(plan.strategy_name, plan.strategy, module)
    problems.raise_any()


def check_created_layers(plan: Plan, module: TrainingModule) -> None:
    """Check the layers of a module whose ``setup`` may have created some.

    Raises:
        ConfigurationError: One line per error.
    """
    if is_overridden(module, StageHooks, "setup"):
        problems = Problems()
        _check_layers(plan, module, problems)
        problems.raise_any()


def _check_layers(plan: Plan, module: TrainingModule, problems: Problems) -> None:
    options = plan.options
    with problems:
        activation_checkpointing.select(module, options.activation_checkpointing)
        compilation.select(module, options.compile, options.activation_checkpointing)
    problems.lines += plan.strategy.problems_of(module)
    initial_weights.check_module(options, plan.started_in, module, problems)
    if options.peak_flops is not None and not module.flops_per_sample:
        problems.add(
            f"peak_flops: set flops_per_sample of {type(module).__name__}, for example to what "
            "torch.utils.flop_counter counts for a training step on one sample"
        )
