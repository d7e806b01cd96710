"""What ``fast_dev_run`` makes of the other options."""

from dataclasses import replace
from typing import Any

from ..errors import Problems, shown
from .fields import Options

_OFF_IN_SHORT_RUNS = (
    *("max_steps", "max_time", "overfit_batches", "check_val_every_n_epoch", "resume"),
    *("val_every_n_steps", "checkpoint_every_n_steps", "checkpoint_every_n_epochs"),
    *("keep_checkpoints", "async_checkpoints", "run_name", "overwrite"),
)


def shortened(options: Options, problems: Problems) -> tuple[Options, list[str]]:
    """Options of a run, which ``fast_dev_run`` makes short, and what to print of that."""
    number = int(options.fast_dev_run)
    if options.overfit_batches:
        both = f"fast_dev_run={number} and overfit_batches={options.overfit_batches!r}"
        problems.add(f"{both} each select batches; give only one of them")
    limits = ("limit_val_batches", "limit_test_batches", "limit_predict_batches")
    short: dict[str, Any] = {
        **dict.fromkeys(limits, number),
        **{name: getattr(Options, name) for name in _OFF_IN_SHORT_RUNS},
        "max_epochs": 1,
        "limit_train_batches": number * options.accumulate_grad_batches,
        "sanity_check": 0,
        "loggers": (),
    }
    replaced = [
        f"{name}={shown(value)}"
        for name in short.keys() - {"loggers"}
        if (value := getattr(options, name)) not in (short[name], getattr(Options, name))
    ]
    es = "" if number == 1 else "es"
    batches = f"{number} batch{es} of validation, test or prediction; no checkpoints, no loggers"
    line = f"fast_dev_run={number}: {number} optimizer step{es[1:]}, and {batches}"
    used = f"{line}; not used: {', '.join(sorted(replaced))}" if replaced else line
    return replace(options, **short), [used]
