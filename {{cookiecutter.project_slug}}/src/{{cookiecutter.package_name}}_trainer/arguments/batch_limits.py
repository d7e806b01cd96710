"""Check the options that limit a run to some batches, and apply ``fast_dev_run``."""

from collections.abc import Iterator
from dataclasses import replace

from ..errors import Problems, shown
from .options import Options

_EVALUATIONS = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")
_LIMITS = ("limit_train_batches", *_EVALUATIONS)
_TRAINING = ("limit_train_batches", "overfit_batches")


def check(options: Options, problems: Problems) -> None:
    """Check limits of batches; ``problems`` collects one line per error."""
    for name in (*_LIMITS, "overfit_batches"):
        value = getattr(options, name)
        may_be_0 = name in ("limit_val_batches", "overfit_batches")
        if not (may_be_0 and value == 0) and not _is_limit(value):
            none = {"limit_val_batches": ", or 0 for no validation", "overfit_batches": ", or 0"}
            problems.add(
                f"{name}={value!r}: give a number of batches, or a fraction above 0 and up to 1.0"
                f"{none.get(name, '')}"
            )
    if options.sanity_check < 0:
        problems.add(
            f"sanity_check={options.sanity_check}: give a number of batches, or 0 for none"
        )
    if options.fast_dev_run < 0:
        problems.add(f"fast_dev_run={options.fast_dev_run}: give a number of steps, or false")
    problems.lines += [*_parts_of_steps(options), *_contradictions(options)]


def _is_limit(value: float) -> bool:
    return value >= 1 if type(value) is int else 0 < value <= 1


def _parts_of_steps(options: Options) -> Iterator[str]:
    accumulate = options.accumulate_grad_batches
    for name in _TRAINING:
        value = getattr(options, name)
        if type(value) is int and value > 0 and accumulate > 1 and value % accumulate:
            yield (
                f"{name}={value}: an optimizer step takes accumulate_grad_batches={accumulate} "
                f"batches; give a multiple of {accumulate}"
            )


def _contradictions(options: Options) -> Iterator[str]:
    if not options.overfit_batches:
        return
    shown_overfit = f"overfit_batches={options.overfit_batches!r}"
    others = {"limit_train_batches": 1.0, "limit_val_batches": 1.0}
    for name, default in others.items():
        if (value := getattr(options, name)) != default or type(value) is int:
            yield (
                f"{shown_overfit} and {name}={value!r} each select batches; give only one of them"
            )


# --- fast_dev_run --------------------------------------------------------------------------------


def of_fast_dev_run(options: Options, problems: Problems) -> tuple[Options, list[str]]:
    """Options of a run with ``fast_dev_run``, and the line that says so.

    Args:
        options: The trainer's, whose types are valid.
        problems: Collects a line if another option contradicts it.

    Returns:
        Options with which the run is short and leaves no trace, and what to print.
    """
    number = options.fast_dev_run
    if number < 1:
        return options, []
    if options.overfit_batches:
        problems.add(
            f"fast_dev_run={number} and overfit_batches={options.overfit_batches!r} each select "
            "batches; give only one of them"
        )
    short = replace(
        options,
        max_epochs=1,
        max_steps=None,
        max_time=None,
        limit_train_batches=number * max(1, options.accumulate_grad_batches),
        limit_val_batches=number,
        limit_test_batches=number,
        limit_predict_batches=number,
        overfit_batches=0,
        sanity_check=0,
        check_val_every_n_epoch=1,
        val_every_n_steps=None,
        checkpoint_every_n_steps=None,
        checkpoint_every_n_epochs=1,
        keep_checkpoints=Options.keep_checkpoints,
        async_checkpoints=False,
        resume=None,
        run_name=None,
        overwrite=False,
        loggers=(),
    )
    plural = "" if number == 1 else "s"
    line = (
        f"fast_dev_run={number}: {number} optimizer step{plural}, and {number} batch"
        f"{'es' if plural else ''} of validation, test or prediction; no checkpoints, no loggers"
    )
    replaced = ", ".join(_replaced(options, short))
    return short, [f"{line}; not used: {replaced}" if replaced else line]


def _replaced(options: Options, short: Options) -> Iterator[str]:
    """Options that the user has given, and ``fast_dev_run`` replaces."""
    for name in Options.__dataclass_fields__:
        value = getattr(options, name)
        if name != "loggers" and value not in (getattr(short, name), getattr(Options, name)):
            yield f"{name}={shown(value)}"


def notes(options: Options) -> list[str]:
    """The line that names the limits of a run, if there are any."""
    if options.fast_dev_run:
        return []
    given = {name: getattr(options, name) for name in _LIMITS}
    limits = [
        f"{name}={value!r}" for name, value in given.items() if type(value) is int or value != 1
    ]
    if options.overfit_batches:
        limits.append(f"overfit_batches={options.overfit_batches!r}")
    return [f"limited by {', '.join(limits)}"] if limits else []
