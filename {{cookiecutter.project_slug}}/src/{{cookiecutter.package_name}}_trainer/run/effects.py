"""Options that would have no effect in a run: refused, so that none is accepted and ignored."""

from collections.abc import Iterable, Mapping, Sequence

from ..callbacks import Callback
from ..errors import Problems, nearest, shown
from ..options import Options
from ..strategies import Strategy
from ..strategies.optimizers import SchedulerConfig

_NO_VALIDATION = "this fit has no validation"


def check_planned(
    options: Options, accelerator: str, strategy: Strategy, problems: Problems
) -> None:
    """Check what is known before any process starts.

    Args:
        options: The trainer's.
        accelerator: Accelerator of the devices.
        strategy: The strategy, which may scale learning rates, too.
        problems: Collects one line per option without effect.
    """
    unused: dict[str, str] = {}
    if options.learning_rate_scaling == "none":
        unused["reference_batch_size"] = "learning_rate_scaling is 'none'"
        if "learning_rate_scaling" not in strategy.limits.refused:
            unused["learning_rate_warmup_steps"] = "learning_rate_scaling is 'none'"
    if options.gradient_clip_val is None:
        unused["gradient_clip_algorithm"] = "gradient_clip_val is not given"
    if accelerator != "cuda" or options.devices in ("auto", -1, "-1"):
        unused["auto_select_gpus"] = "it selects idle GPUs if devices is their number"
    problems.lines += _without_effect(options, unused)


def check_read(
    options: Options, callbacks: Sequence[Callback], *, validates: bool, orders: bool
) -> None:
    """Check what depends on the loaders.

    Args:
        options: The trainer's.
        callbacks: The trainer's.
        validates: Whether the fit has validations.
        orders: Whether the trainer controls the order of the training samples.

    Raises:
        ConfigurationError: One line per option or callback without effect.
    """
    problems, unused = Problems(), dict[str, str]()
    if orders:
        unused["uneven_inputs"] = (
            "the trainer gives each rank the same number of batches of this loader"
        )
    if not validates:
        names = ("sanity_check", "val_every_n_steps", "check_val_every_n_epoch")
        unused |= dict.fromkeys(names, _NO_VALIDATION)
        problems.lines += [
            f"{type(each).__name__}: it monitors {each.monitored!r} in validations, and "
            f"{_NO_VALIDATION}; leave it out"
            for each in callbacks
            if each.monitored is not None
        ]
    problems.lines += _without_effect(options, unused)
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


def _without_effect(options: Options, unused: Mapping[str, str]) -> list[str]:
    """One line for each of these options that is given; 0, False and None turn one off."""
    return [
        f"{name}={shown(value)} has no effect: {reason}; leave it out"
        for name, reason in unused.items()
        if (value := getattr(options, name)) and value != getattr(Options, name)
    ]
