"""Validation, test and prediction: each sample once, on any number of processes."""

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..callbacks import Callback
from ..data import Feed, moving, randomness
from ..errors import UserError, nearest, refuse
from ..launch import collectives
from ..logging import Recorder, torchmetrics_state
from ..module import TrainingModule
from ..strategies import Strategy
from .parts import FitParts, read

_CPU = torch.device("cpu")
_OF_VALIDATION = re.compile(r"(?i)(?<![a-z])e?val(id|idation)?(?![a-z])")


def evaluate(
    module: TrainingModule,
    strategy: Strategy,
    recorder: Recorder,
    feeds: Mapping[str, Feed],
    stage: Literal["validation", "test"],
) -> dict[str, float]:
    """Run all batches of a stage and reduce the logged values, those of each loader by themselves.

    ``feeds`` has the batches by name of their loader, ``""`` for a single one.
    """
    values, counts = dict[str, float](), strategy.data.counts
    with _evaluating(module, strategy, recorder):
        getattr(module, f"on_{stage}_epoch_start")()
        for name, feed in feeds.items():
            recorder.context = recorder.context._replace(loader=name)
            for batch in read(strategy, feed, 0, 0):
                facts: dict[str, Any] = {"samples": batch.samples, "counted": batch.counted}
                recorder.context = recorder.context._replace(**facts)
                with torchmetrics_state.unchanged(module, batch.samples and counts):
                    output = strategy.forward(stage, batch.data, batch.number)
                if output is not None and batch.number == 0 and collectives.rank() == 0:
                    warnings.warn(
                        f"{type(module).__name__}.{stage}_step returned {type(output).__name__}, "
                        "which is not used: log values with self.log",
                        stacklevel=2,
                    )
            if name:  # a metric object may be logged again, for the next loader
                values |= recorder.take_epoch()
        # Of no batch: every rank counts the same, whatever its last batch was.
        recorder.context = recorder.context._replace(loader="", samples=1, counted=1.0)
        getattr(module, f"on_{stage}_epoch_end")()
        return values | recorder.take_epoch()


def check_validation(
    module: TrainingModule, strategy: Strategy, recorder: Recorder, feeds: Mapping[str, Feed]
) -> dict[str, float]:
    """Run some validation batches before training, and restore all that they have changed."""
    with torchmetrics_state.unchanged(module), _same_buffers(module):
        try:
            return evaluate(module, strategy, recorder, feeds, "validation")
        except Exception as error:
            error.add_note("in a check of validation before the first step; see sanity_check")
            raise


def unmonitored(
    fit: FitParts, callbacks: Sequence[Callback], logged: Sequence[str], is_whole: bool
) -> list[str]:
    """Notes on values that are monitored, and that a first validation has not logged.

    It is refused if by its name only validation logs it, and the first was like later ones.
    """
    names = [(type(each).__name__, each.monitored) for each in callbacks]
    names += [(type(each.scheduler).__name__, each.monitor) for each in fit.optimization.schedulers]
    lines = {
        f"{owner} monitors {name!r}, which validation does not log{nearest(name, logged)}": name
        for owner, name in names
        if name is not None and name not in logged
    }
    refuse([line for line, name in lines.items() if is_whole and _OF_VALIDATION.search(name)])
    return [f"{line}; it ends the run unless training logs it" for line in lines]


@contextlib.contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers: a validation step may change them, or put others in their place."""
    owners = [(each, dict(each._buffers)) for each in module.modules()]
    copies = [
        (buffer, buffer.clone())
        for _, buffers in owners
        for buffer in buffers.values()
        if buffer is not None and not _is_freed(buffer)
    ]
    yield
    with torch.no_grad():
        for buffer, copy in copies:
            buffer.copy_(copy)
    for owner, buffers in owners:
        owner._buffers.update(buffers)


def _is_freed(tensor: Tensor) -> bool:
    """Whether only its shape remains: it belongs to another stage of a pipeline."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta
    return is_dense and tensor.untyped_storage().nbytes() < tensor.nbytes


def predict(
    module: TrainingModule,
    strategy: Strategy,
    recorder: Recorder,
    feeds: Mapping[str, Feed],
    *,
    is_written: bool,
) -> dict[str, list[Any]]:
    """Run all batches and collect the outputs of ``predict_step``: by loader, one per batch.

    They are gathered from all ranks, in the dataset's order. ``is_written``: refuse at once what
    cannot be written, as on several ranks.
    """
    from . import predictions  # not for a fit

    found: dict[str, list[Any]] = {}
    data, is_shared = strategy.data, collectives.world_size() > 1
    with _evaluating(module, strategy, recorder):
        for name, feed in feeds.items():
            recorder.context = recorder.context._replace(loader=name)
            outputs, packed = [], []
            for batch in read(strategy, feed, 0, 0):
                output = strategy.forward("predict", batch.data, batch.number)
                for logged in recorder.names:
                    raise UserError(f"log({logged!r}): predict_step does not log: return the value")
                # Among ranks of a replica, a lower one has the same outputs.
                if batch.samples and data.counts and data.is_first:
                    is_here = strategy.device == _CPU
                    output = moving.mapped(output, _own) if is_here else moving.move(output, _CPU)
                    if is_shared:
                        packed.append(predictions.pack(batch.number, output))
                        continue
                    if is_written:
                        predictions.pack(batch.number, output)
                    outputs.append(output)
            found[name] = predictions.gathered(packed, data.index) if is_shared else outputs
    return found


def _own(value: Any) -> Any:
    """A copy of a tensor: the module may write the next batch's output into it."""
    return value.clone() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _evaluating(module: nn.Module, strategy: Strategy, recorder: Recorder) -> Iterator[None]:
    """Evaluation mode in this context; training then continues as if nothing had happened."""
    modes = [(child, child.training) for child in module.modules()]
    devices = strategy.data.devices
    state = randomness.full_state(devices)
    module.eval()
    try:
        apart = torchmetrics_state.set_aside(module, recorder.metrics.values())
        with apart, recorder.evaluating(), torch.no_grad(), strategy.evaluating():
            yield
    finally:
        randomness.set_full_state(state, devices)
        for child, mode in modes:
            child.training = mode
