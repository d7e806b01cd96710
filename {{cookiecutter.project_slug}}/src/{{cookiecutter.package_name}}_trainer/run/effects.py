"""Options that would have no effect in a run: refused, so that none is accepted and ignored."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ..callbacks import Callback
from ..errors import Problems, nearest, shown
from ..options import Options
from ..strategies import Strategy
from ..strategies.optimizers import SchedulerConfig


class Planned(NamedTuple):
    """What is known before any process starts."""

    options: Options
    accelerator: str
    strategy: Strategy

    @property
    def scales_rates(self) -> bool:
        """Whether the trainer or the strategy scales learning rates."""
        by_strategy = "learning_rate_scaling" in self.strategy.limits.refused
        return self.options.learning_rate_scaling != "none" or by_strategy

    @property
    def selects_gpus(self) -> bool:
        """Whether there are GPUs to select from."""
        return self.accelerator == "cuda" and self.options.devices not in ("auto", -1, "-1")


class Read(NamedTuple):
    """What is known when the loaders are created."""

    validates: bool
    orders: bool
    """Whether the trainer controls the order of the training samples."""


Run = TypeVar("Run", Planned, Read)

_NO_SCALING = "learning_rate_scaling is 'none'"
_NO_VALIDATION = "this fit has no validation"
# What an option that is not its default needs for an effect, and the reason if that is missing.
_PLANNED: Mapping[str, tuple[Callable[[Planned], bool], str]] = {
    "reference_batch_size": (lambda run: run.options.learning_rate_scaling != "none", _NO_SCALING),
    "learning_rate_warmup_steps": (lambda run: run.scales_rates, _NO_SCALING),
    "gradient_clip_algorithm": (
        lambda run: run.options.gradient_clip_val is not None,
        "gradient_clip_val is not given",
    ),
    "auto_select_gpus": (
        lambda run: run.selects_gpus,
        "it selects idle GPUs if devices is their number",
    ),
}
_READ: Mapping[str, tuple[Callable[[Read], bool], str]] = {
    "uneven_inputs": (
        lambda run: not run.orders,
        "the trainer gives each rank the same number of batches of this loader",
    ),
    "sanity_check": (lambda run: run.validates, _NO_VALIDATION),
    "val_every_n_steps": (lambda run: run.validates, _NO_VALIDATION),
    "check_val_every_n_epoch": (lambda run: run.validates, _NO_VALIDATION),
}


def check_planned(run: Planned, problems: Problems) -> None:
    """Check the options; ``problems`` collects one line per option without effect."""
    invalid = {line.partition("=")[0] for line in problems.lines}
    table = {name: each for name, each in _PLANNED.items() if name not in invalid}
    problems.lines += _without_effect(run.options, run, table)


def check_read(options: Options, callbacks: Sequence[Callback], run: Read) -> None:
    """Check what depends on the loaders.

    Raises:
        ConfigurationError: One line per option or callback without effect.
    """
    problems = Problems()
    problems.lines += _without_effect(options, run, _READ)
    if not run.validates:
        problems.lines += [
            f"{type(each).__name__}: it monitors {each.monitored!r} in validations, and "
            f"{_NO_VALIDATION}; leave it out"
            for each in callbacks
            if each.monitored is not None
        ]
    problems.raise_any()


def unlogged(
    callbacks: Sequence[Callback], schedulers: Sequence[SchedulerConfig], values: Iterable[str]
) -> list[str]:
    """One line for each monitored value that a first validation has not logged."""
    names = [(type(each).__name__, each.monitored) for each in callbacks]
    names += [(type(each.scheduler).__name__, each.monitor) for each in schedulers]
    return [
        f"{owner} monitors {name!r}, which validation does not log{nearest(name, values)}; "
        "it ends the run unless training logs it"
        for owner, name in names
        if name is not None and name not in values
    ]


def _without_effect(
    options: Options, run: Run, table: Mapping[str, tuple[Callable[[Run], bool], str]]
) -> list[str]:
    return [
        f"{name}={shown(value)} has no effect: {reason}; leave it out"
        for name, (is_used, reason) in table.items()
        # 0, False and None turn an option off.
        if (value := getattr(options, name)) and value != getattr(Options, name)
        if not is_used(run)
    ]
