"""The plan of a run: its options, checked before any process starts, and what follows from them.

Each concern checks its own options; here all errors are collected and raised at once. No check
changes global state: environment variables are set where a run starts (``trainer.py``).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..callbacks import Callback
from ..callbacks.calls import create as create_callbacks
from ..callbacks.calls import problems_of_manual
from ..checkpoint import run_choice
from ..data import sources
from ..data.feed_creation import device_batch_size
from ..errors import Problems, refuse, shown
from ..launch import cluster, files
from ..logging import Logger
from ..logging.logger import create as create_loggers
from ..module import DataHooks, TrainingModule, hooks
from ..options import Options, reading
from ..strategies import Strategy
from ..strategies.precision import Precision
from . import environment, placement
from .placement import Placement


@dataclass(frozen=True)
class Plan:
    """The plan of a run, after all checks.

    ``started_in``: the working directory when the trainer was created, because user code may change
    it: relative paths refer to it.
    """

    options: Options
    layout: cluster.Layout
    node_devices: tuple[torch.device, ...]  # of all processes of this node
    strategy_name: str
    strategy: Strategy
    precision: Precision
    request: run_choice.Request
    started_in: Path
    callbacks: tuple[Callback, ...]
    loggers: Mapping[str, Logger]
    notes: Sequence[str] = ()  # to print at the start
    total_steps: int | None = None  # those of the run that this one tries

    @property
    def local_processes(self) -> int:
        return self.strategy.limits.local_processes(len(self.node_devices))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of this process: all of its node's if it is the only one there, or its own."""
        if self.local_processes == 1:
            return self.node_devices
        return (self.node_devices[self.layout.local_rank],)

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def shown(self, path: Path) -> Path:
        """A path as the user would write it in the directory where the program was started."""
        return files.shown(path, self.started_in)

    def building(self) -> AbstractContextManager[object]:
        """Context in which layers are created: with ``meta_device``, on the meta device."""
        if not self.options.meta_device:
            return nullcontext()
        from ..memory import meta_device

        return meta_device.building()


Find = Callable[[Options, Problems], Placement]


def make(requested: Options, problems: Problems, find: Find = placement.find) -> Plan:
    """Check the options of a trainer, and plan its run, or raise a ConfigurationError.

    ``problems``: those of reading the options; ``find`` finds where the run will be.
    """
    options, notes = requested, list[str]()
    if requested.fast_dev_run:
        from ..options import short_runs

        options, notes = short_runs.shortened(requested, problems)
    where = find(options, problems)
    is_placed = not problems.lines
    _check_options(options, where, problems)
    callbacks = create_callbacks(options.callbacks, problems)
    loggers = create_loggers(options.loggers, problems)
    for logger in loggers.values():
        problems.lines += hooks.problems_of_signatures(logger, Logger)
    precision = Precision("32-true", where.accelerator)
    with problems:
        precision = Precision(str(options.precision), where.accelerator)
    _check_strategy(options, where, callbacks, problems)
    if is_placed:
        _check_placed(options, where, problems)
    problems.raise_any()
    return Plan(
        options=options,
        layout=where.layout,
        node_devices=where.torch_devices,
        strategy_name=where.name,
        strategy=where.strategy,
        precision=precision,
        request=run_choice.Request.of(options),
        started_in=Path.cwd(),
        callbacks=callbacks,
        loggers=loggers,
        notes=[*notes, *cluster.unused(where.layout, len(where.devices))],
    )


def make_elsewhere(kwargs: Mapping[str, Any]) -> Plan:
    """Plan the run of a trainer with these keywords on another machine than this one."""
    problems = Problems()
    options = reading.read(kwargs, problems)
    return make(options, problems, partial(placement.find_elsewhere, str(options.accelerator)))


def _check_options(options: Options, where: Placement, problems: Problems) -> None:
    """Check what does not depend on the strategy."""
    with problems:
        environment.check(where.is_here and max(len(where.devices), where.layout.world_size) > 1)
    reading.check(options, problems)
    if options.changes_layers:
        from ..loop import compilation
        from ..memory import activation_checkpointing

        compilation.check(options.compile, problems)
        with problems:
            activation_checkpointing.check_names(options.activation_checkpointing)
        if where.is_here and "compile" not in where.strategy.limits.refused:
            with problems:
                compilation.check_compiler(options.compile)
    run_choice.check(options, where.layout, problems)
    if options.weights is not None and options.resume is None:  # a run that resumes needs none
        from . import initial_weights

        initial_weights.check(options, problems)


def _check_strategy(
    options: Options, where: Placement, callbacks: Sequence[Callback], problems: Problems
) -> None:
    """Check whether the strategy supports the launch, and all that a run requires of it."""
    strategy, name = where.strategy, where.name
    problems.lines += placement.check(options, where)
    used = {
        "sync_batchnorm": options.sync_batchnorm,
        "compile": bool(options.compile),
        "activation_checkpointing": bool(options.activation_checkpointing),
        "log_gradient_norm": options.log_gradient_norm,
        # A gradient scaler skips steps by itself.
        "skipping": options.nonfinite_loss == "skip" and options.precision != "16-mixed",
        "uneven_inputs": options.uneven_inputs == "join",
        "learning_rate_scaling": options.learning_rate_scaling != "none",
        "trainable_weights": options.checkpoint_weights == "trainable",
    }
    features = {name for name, is_used in used.items() if is_used}
    features = features.union(*(callback.needs for callback in callbacks))
    asked = where.accelerator, str(options.precision), len(where.devices), where.nodes
    problems.lines += strategy.limits.problems(name, *asked, features)
    with problems:
        problems.lines += strategy.problems(options, None)


def _check_placed(options: Options, where: Placement, problems: Problems) -> None:
    """Check the numbers of processes and samples, and options without effect there."""
    strategy, devices = where.strategy, len(where.devices)
    unused: dict[str, str] = {}
    if options.learning_rate_scaling == "none":
        unused["reference_batch_size"] = "learning_rate_scaling is 'none'"
        if "learning_rate_scaling" not in strategy.limits.always:
            unused["learning_rate_warmup_steps"] = "learning_rate_scaling is 'none'"
    if options.gradient_clip_val is None:
        unused["gradient_clip_algorithm"] = "gradient_clip_val is not given"
    if where.accelerator != "cuda" or options.devices in ("auto", -1, "-1"):
        unused["auto_select_gpus"] = "it selects idle GPUs if devices is their number"
    problems.lines += _without_effect(options, unused)
    if not where.is_counted:
        return
    with problems:
        replicas = strategy.replicas(devices, where.nodes)
        accumulate, size = options.accumulate_grad_batches, options.global_batch_size
        if size is not None and accumulate > 0:
            device_batch_size(size, replicas, accumulate)


def _without_effect(options: Options, unused: Mapping[str, str]) -> list[str]:
    """One line for each of these options that is given; 0, False and None turn one off."""
    return [
        f"{name}={shown(value)} has no effect: {reason}; leave it out"
        for name, reason in unused.items()
        if (value := getattr(options, name)) and value != getattr(Options, name)
    ]


def check_module(plan: Plan, module: TrainingModule) -> None:
    """Raise a ConfigurationError with all that a module lacks, or that does not fit the options."""
    problems, options, strategy = Problems(), plan.options, plan.strategy
    if (options.max_epochs, options.max_steps, options.max_time) == (None, None, None):
        problems.add("give max_epochs, max_steps or max_time: training would not end")
    needed = ["training_step", "configure_optimizers"][: 1 + strategy.limits.needs_optimizers]
    problems.lines += sources.missing(module, needed)
    if module.may_skip_batches or not module.automatic_optimization:
        from ..loop.manual_optimization import problems_of

        problems.lines += problems_of(module, plan.strategy_name, strategy, options)
    if not hooks.is_overridden(module, DataHooks, "setup"):  # else after it: it may create layers
        problems.lines += _problems_of_layers(plan, module)
    problems.lines += [
        f"{type(module).__name__}.{name} is {shown(own)}, not a method: give it another name"
        for name, method in vars(TrainingModule).items()
        if inspect.isfunction(method) and not callable(own := getattr(module, name))
    ]
    problems.lines += hooks.problems_of_names(module, TrainingModule)
    problems.lines += hooks.problems_of_signatures(module, hooks.Hooks)
    problems.lines += hooks.problems_of_signatures(module, DataHooks)
    if not module.automatic_optimization:
        problems.lines += problems_of_manual(plan.callbacks, module)
    if not plan.layout.started_outside:  # otherwise rank 0 checks this before it writes
        with problems:
            run_choice.check_new(plan.request)
    problems.raise_any()


def check_created_layers(plan: Plan, module: TrainingModule) -> None:
    """Raise a ConfigurationError if the layers that ``setup`` may have created do not fit."""
    if hooks.is_overridden(module, DataHooks, "setup"):
        refuse(_problems_of_layers(plan, module))


def _problems_of_layers(plan: Plan, module: TrainingModule) -> list[str]:
    problems, options = Problems(), plan.options
    if lines := hooks.problems_of_lazy(module):
        return lines
    if len(plan.node_devices) * plan.layout.num_nodes > 1:
        problems.lines += hooks.problems_of_max_norm(module)
    if options.changes_layers:
        from ..loop import compilation
        from ..memory import activation_checkpointing

        with problems:
            activation_checkpointing.select(module, options.activation_checkpointing)
            compilation.select(module, options.compile, options.activation_checkpointing)
    problems.lines += plan.strategy.problems(options, module)
    if options.weights is not None and options.resume is None:  # a run that resumes needs none
        from . import initial_weights

        with problems:
            initial_weights.check_module(options, plan.started_in, module)
    if options.peak_flops is not None and not module.flops_per_sample:
        problems.add(
            f"peak_flops: set flops_per_sample of {type(module).__name__}, for example to what "
            "torch.utils.flop_counter counts for a training step on one sample"
        )
    return problems.lines


def check_loaders(plan: Plan, *, validates: bool, orders: bool) -> None:
    """Raise a ConfigurationError with options and callbacks that the loaders leave without effect.

    ``orders``: whether the trainer controls the order of the training samples.
    """
    lines, unused = list[str](), {"global_batch_size": "the training loader is read as it is"}
    if orders:
        why = "the trainer gives each rank the same number of batches of this loader"
        unused = {} if validates else {"uneven_inputs": why}
    if not validates:
        why = "this fit has no validation"
        names = ("sanity_check", "val_every_n_steps", "check_val_every_n_epoch")
        unused |= dict.fromkeys(names, why)
        lines = [
            f"{type(callback).__name__}: it monitors {callback.monitored!r} in validations, and "
            f"{why}; leave it out"
            for callback in plan.callbacks
            if callback.monitored is not None
        ]
    refuse(lines + _without_effect(plan.options, unused))
