"""Load trained models in a script or a notebook."""

import sys
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, read_all, resolve
from ..errors import CheckpointError, ConfigurationError, one_line
from ..module import TrainingModule
from ..options import class_paths
from . import imports, saved_runs


def load_module(run: str | Path, *, averaged: bool = True, trust: bool = False) -> TrainingModule:
    """Create the model of a run, with its class, arguments and trained weights.

    Args:
        run: A run directory, whose newest checkpoint is used; or a checkpoint, such as
            ``"runs/RUN/best"``.
        averaged: Use the average (EMA) of a checkpoint that has one; False: the weights of
            training.
        trust: Import the class also from the working directory, not only from this package and
            installed ones. Modules that are imported already need no trust.

    Returns:
        The module on the CPU, in evaluation mode.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not fit the class.
        ConfigurationError: The run has no configuration, because a script has started it, or its
            class cannot be created.

    Example::

        module = load_module("runs/RUN/best")
        with torch.no_grad():
            output = module(inputs)
    """
    path = resolve(run)
    section = saved_runs.classes_of(path).get("model")
    if section is None:
        raise ConfigurationError(
            f"{path}: its run has no config.yaml with a model, because a script has started it; "
            "create the module, and use load_weights"
        )
    with imports.checked(from_run=not trust):
        module: TrainingModule = class_paths.read("model", section, TrainingModule, {}).create()
    load_weights(module, path, averaged=averaged)
    return module.eval()


def load_weights(module: TrainingModule, run: str | Path, *, averaged: bool = True) -> None:
    """Load the trained weights of a run, or of a checkpoint, into a module.

    ``averaged`` is as in :func:`load_module`.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not fit the module.
    """
    checkpoint = Checkpoint(resolve(run))
    try:
        module.load_state_dict(read_weights(checkpoint, averaged=averaged))
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint.path}: does not fit {type(module).__name__} ({one_line(error)})"
        ) from None


def read_weights(checkpoint: Checkpoint, *, averaged: bool) -> dict[str, Any]:
    """Read the whole state dict of a checkpoint's module; prints a line if it is an average."""
    checkpoint.check_contents()
    stored, remarks = checkpoint.weights(averaged)
    for line in remarks:
        print(line, file=sys.stderr)
    weights: dict[str, Any] = read_all(stored)
    return weights
