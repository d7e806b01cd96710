"""Check the ranges of numeric arguments."""

import math
from collections.abc import Iterator

from ..errors import Problems
from .options import Options


def check(options: Options, problems: Problems) -> None:
    """Check numeric options, whose types are valid.

    Args:
        options: The trainer's.
        problems: Collects a line for each number out of range.
    """
    for name, value in _counts(options):
        if type(value) is not int or value < 1:
            problems.add(f"{name}={value!r}: give a whole number of at least 1")
    bound = options.gradient_clip_val
    if bound is not None and not 0 < bound < math.inf:
        problems.add(f"gradient_clip_val={bound!r}: give a number above 0, or none")
    peak = options.peak_flops
    if peak is not None and not 0 < peak < math.inf:
        problems.add(f"peak_flops={peak!r}: give a number above 0, or none")
    if options.keep_checkpoints < 2:
        problems.add(
            f"keep_checkpoints={options.keep_checkpoints}: keep at least 2, so that one is always "
            "complete"
        )
    if not 0 <= options.seed < 2**63:
        problems.add(f"seed={options.seed}: give a number from 0 to 2**63 - 1")


def _counts(options: Options) -> Iterator[tuple[str, int]]:
    """Options that must be at least 1, if they are given."""
    yield "accumulate_grad_batches", options.accumulate_grad_batches
    yield "log_every_n_steps", options.log_every_n_steps
    yield "check_val_every_n_epoch", options.check_val_every_n_epoch
    yield "checkpoint_every_n_epochs", options.checkpoint_every_n_epochs
    optional = {
        "max_epochs": options.max_epochs,
        "max_steps": options.max_steps,
        "val_every_n_steps": options.val_every_n_steps,
        "checkpoint_every_n_steps": options.checkpoint_every_n_steps,
        "num_nodes": options.num_nodes,
    }
    yield from ((name, value) for name, value in optional.items() if value is not None)
