"""Check the ranges of numeric arguments."""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import Problems


def check(given: Mapping[str, Any], problems: Problems) -> None:
    """Check numeric arguments of the trainer, whose types are valid.

    Args:
        given: Arguments by name.
        problems: Collects a line for each number out of range.
    """
    at_least_one = ("accumulate_grad_batches", "log_every_n_steps", "check_val_every_n_epoch")
    optional = (
        "max_epochs",
        "max_steps",
        "val_every_n_steps",
        "checkpoint_every_n_steps",
        "num_nodes",
    )
    for name in (*at_least_one, *optional):
        value = given[name]
        if (value is not None or name in at_least_one) and (type(value) is not int or value < 1):
            problems.add(f"{name}={value!r}: give a whole number of at least 1")
    bound = given["gradient_clip_val"]
    if bound is not None and not 0 < bound < math.inf:
        problems.add(f"gradient_clip_val={bound!r}: give a number above 0, or none")
    if given["keep_checkpoints"] < 2:
        problems.add(
            f"keep_checkpoints={given['keep_checkpoints']}: keep at least 2; one is always whole"
        )
    if not 0 <= given["seed"] < 2**63:
        problems.add(f"seed={given['seed']}: give a number from 0 to 2**63 - 1")
