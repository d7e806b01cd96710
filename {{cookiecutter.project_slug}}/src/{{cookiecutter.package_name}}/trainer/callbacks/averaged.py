"""Write the averaged weights of a checkpoint, to evaluate them or to train from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, Checkpoints, resolve
from ..errors import CheckpointError
from .weight_average import AVERAGE


def save_averaged(checkpoint: str | Path, directory: str | Path) -> Path:
    """Write a checkpoint of the averaged weights of another one, for evaluation.

    It contains the model only: the average where there is one, and the other parameters and the
    buffers as they are. Call it in one process, which reads the whole model.

    Args:
        checkpoint: A checkpoint, or a run directory, whose newest checkpoint is used.
        directory: Where to write it; give this directory to ``test`` as its ``checkpoint``.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: It has no average, or several; or it cannot be read or written.

    Example::

        save_averaged("runs/RUN", "runs/RUN/averaged")
    """
    source = Checkpoint(resolve(checkpoint))
    state = source.state()
    average = _average(state, source.path)
    target = Checkpoints(Path(directory))
    target.save(source.step, {"model": {**state["model"], **average}}, {})
    return target.path(source.step)


def _average(state: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    callbacks = state.get("callbacks", {})
    found = {name: each[AVERAGE] for name, each in callbacks.items() if each.get(AVERAGE)}
    if not found:
        raise CheckpointError(
            f"{path}: has no averaged weights; train with EMA or StochasticWeightAveraging"
        )
    if len(found) > 1:
        raise CheckpointError(f"{path}: has several averages: {', '.join(found)}")
    average: Mapping[str, Any] = next(iter(found.values()))
    return average
