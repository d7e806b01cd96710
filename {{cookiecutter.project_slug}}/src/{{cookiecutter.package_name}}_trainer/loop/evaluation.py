"""Validation, test and prediction: each sample once, on any number of processes."""

import contextlib
import dataclasses
import math
import operator
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..callbacks import Callback
from ..checkpoint.tensor_files import as_bytes
from ..data import Feed, moving, randomness
from ..errors import UserError, nearest, refuse
from ..launch import collectives
from ..launch.output import print_once
from ..logging import Recorder, torchmetrics_state
from ..module import TrainingModule
from ..module.hooks import is_overridden, with_own_mode
from ..options.values import plain_number
from ..strategies import Strategy
from .parts import FitParts, read

_CPU = torch.device("cpu")
_CELLS = (str, bool, int, float, type(None))
_OF_VALIDATION = re.compile(r"(?i)(?<![a-z])e?val(id|idation)?(?![a-z])")


def evaluate(
    module: TrainingModule,
    strategy: Strategy,
    recorder: Recorder,
    feeds: Mapping[str, Feed],
    stage: Literal["validation", "test"],
    latest: dict[str, float],
) -> dict[str, float]:
    """Run all batches of a stage and reduce the logged values, those of each loader by themselves.

    ``feeds`` has the batches by name of their loader, ``""`` for a single one; ``latest`` gets the
    values that the steps have logged before the hook at the end is called.
    """
    values, counts = dict[str, float](), strategy.data.counts
    with _evaluating(module, strategy, recorder):
        getattr(module, f"on_{stage}_epoch_start")()
        for name, feed in feeds.items():
            recorder.context = recorder.context._replace(loader=name, is_even=feed.is_even)
            recorder.may_lack_names = True
            for batch in read(strategy, feed, 0, 0):
                recorder.may_lack_names = not counts
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
            if not feed.has_plan or feed.batches == 1:  # there may be ranks without a batch
                _join_metrics(module, recorder)
            if name:  # a metric object may be logged again, for the next loader
                values |= recorder.take_epoch()
        # Of no batch: every rank counts the same, whatever its last batch was.
        after = recorder.context._replace(loader="", samples=1, counted=1.0, is_even=True)
        recorder.context = after
        if is_overridden(module, TrainingModule, f"on_{stage}_epoch_end"):
            latest |= values | recorder.epoch_values()
        getattr(module, f"on_{stage}_epoch_end")()
        values |= recorder.take_epoch()
    if (both := sorted(values.keys() & recorder.of_training)) and collectives.rank() == 0:
        names = f"{', '.join(both)}: one curve shows both; use two names"
        print_once(f"note: training and {stage} log {names}")
    return values


def _join_metrics(module: TrainingModule, recorder: Recorder) -> None:
    """Let all ranks compute the metric objects that any of them has logged."""
    objects = torchmetrics_state.by_path(module)
    paths = {id(metric): path for path, metric in objects.items()}
    logged = {name: paths.get(id(metric)) for name, metric in recorder.metrics.items()}
    for of_rank in collectives.gather(logged):
        known = {name: objects[path] for name, path in of_rank.items() if path in objects}
        recorder.metrics = known | recorder.metrics


def check_validation(
    module: TrainingModule,
    strategy: Strategy,
    recorder: Recorder,
    feeds: Mapping[str, Feed],
    latest: dict[str, float],
) -> dict[str, float]:
    """Run some validation batches before training, and restore all that they have changed."""
    kept = dict(latest)
    with torchmetrics_state.unchanged(module), _same_buffers(module):
        try:
            return evaluate(module, strategy, recorder, feeds, "validation", latest)
        except Exception as error:
            error.add_note("in a check of validation before the first step; see sanity_check")
            raise
        finally:
            latest.clear()
            latest |= kept


def unmonitored(
    fit: FitParts, callbacks: Sequence[Callback], logged: Sequence[str], is_complete: bool
) -> list[str]:
    """Notes on values that are monitored, and that a first validation has not logged.

    It is refused if by its name only validation logs it, and the first was like later ones.
    """
    strict = [callback for callback in callbacks if getattr(callback, "strict", True)]
    names = [(type(callback).__name__, callback.monitored) for callback in strict]
    names += [(type(s.scheduler).__name__, s.monitor) for s in fit.optimization.schedulers]
    lines = {
        f"{owner} monitors {name!r}, which validation does not log{nearest(name, logged)}": name
        for owner, name in names
        if name is not None and name not in logged
    }
    refuse([line for line, name in lines.items() if is_complete and _OF_VALIDATION.search(name)])
    return [f"{line}; it ends the run unless training logs it" for line in lines]


@contextlib.contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers: a validation step may change them, or put others in their place."""
    owners = [(owner, dict(owner._buffers)) for owner in module.modules()]
    copies = [(buffer, buffer.clone()) for buffer in module.buffers() if not _is_freed(buffer)]
    yield
    with torch.no_grad():
        for buffer, copy in copies:
            buffer.copy_(copy)
    for owner, buffers in owners:
        for name, value in buffers.items():  # a ScriptModule has no update
            owner._buffers[name] = value


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

    Gathered from all ranks, in the dataset's order. ``is_written``: refuse what cannot be written.
    """
    predictions: dict[str, list[Any]] = {}
    data, is_shared = strategy.data, collectives.world_size() > 1
    with _evaluating(module, strategy, recorder):
        for name, feed in feeds.items():
            recorder.context = recorder.context._replace(loader=name, is_even=feed.is_even)
            outputs, packed = [], []
            for batch in read(strategy, feed, 0, 0):
                output = strategy.forward("predict", batch.data, batch.number)
                if logged := recorder.names:
                    raise UserError(f"log({logged[0]!r}): predict_step does not log; return it")
                # Among ranks of a replica, a lower one has the same outputs.
                if batch.samples and data.counts and data.is_first:
                    if strategy.device != _CPU:
                        output = moving.move(output, _CPU)
                    else:  # a copy: the module may write the next batch's output into it
                        output = moving.mapped_tensors(output, Tensor.clone)
                    if is_shared:
                        packed.append(pack(batch.number, output))
                        continue
                    if is_written:
                        pack(batch.number, output)
                    outputs.append(output)
            predictions[name] = gathered(packed, data.index) if is_shared else outputs
    return predictions


@contextlib.contextmanager
def _evaluating(module: nn.Module, strategy: Strategy, recorder: Recorder) -> Iterator[None]:
    """Evaluation mode in this context; training then continues as if nothing had happened."""
    modes = [(child, child.training) for child in module.modules()]
    devices = strategy.data.devices
    state = randomness.full_state(devices)
    module.eval()
    try:
        torchmetrics_state.sync_evenly(module)
        apart = torchmetrics_state.set_aside(module, recorder.metrics.values())
        with apart, recorder.evaluating(), torch.no_grad(), strategy.evaluating():
            yield
    finally:
        randomness.set_full_state(state, devices)
        for child in with_own_mode(module):
            child.train(dict(modes)[child])
        for child, mode in modes:
            child.training = mode


# --- predictions, of any nesting: checked, and sent between ranks without pickle ------------------


class Packed(NamedTuple):
    """The prediction for a batch as JSON, and its tensors."""

    batch: int
    tree: Any
    tensors: list[Tensor]


def pack(batch: int, output: Any) -> Packed:
    """Convert what ``predict_step`` returned; refuse objects of other types."""
    packed = Packed(batch, None, [])
    return packed._replace(tree=_tree(output, packed.tensors))


def plain(output: Any) -> Any:
    """The same nesting of tensors and Python's own types, for ``torch.save``."""
    _, tree, tensors = pack(0, output)
    # Without the rest of a tensor of which it is a view: that would be written, too.
    return _unpack(tree, [tensor.detach().clone() for tensor in tensors], is_plain=True)


def table(outputs: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of batches that are each a dict of columns of one length; empty if one is not."""
    rows: list[dict[str, Any]] = []
    for out in outputs:
        if not (isinstance(out, Mapping) and out and all(isinstance(name, str) for name in out)):
            return []
        columns = [value.tolist() if hasattr(value, "tolist") else value for value in out.values()]
        are_flat = all(
            isinstance(column, list | tuple) and all(isinstance(x, _CELLS) for x in column)
            for column in columns
        )
        if (rows and out.keys() != rows[0].keys()) or not are_flat or len({*map(len, columns)}) > 1:
            return []
        rows += [dict(zip(out, row, strict=True)) for row in zip(*columns, strict=True)]
    return rows


def gathered(outputs: Sequence[Packed], replica: int) -> list[Any]:
    """The predictions of all ranks in the dataset's order, on every rank."""
    most = collectives.all_reduce(torch.tensor([len(outputs)]), "max")
    unpacked = []
    for index in range(int(most)):  # batch by batch: in memory, the bytes of all are there once
        head, parts = None, [torch.zeros(1, dtype=torch.uint8)]  # never empty
        if index < len(outputs):
            batch, tree, tensors = outputs[index]
            forms = [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors]
            head, parts = [batch, replica, tree, forms], [*map(as_bytes, tensors), *parts]
        heads = collectives.gather(head)
        for header, content in zip(heads, collectives.all_gather(torch.cat(parts)), strict=True):
            if header is not None:
                unpacked.append((*header[:2], _unpack(header[2], _tensors(content, header[3]))))
    return [output for *_, output in sorted(unpacked, key=operator.itemgetter(0, 1))]


def _tree(value: Any, tensors: list[Tensor]) -> Any:
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided
    if is_plain and not (value.is_nested or value.is_quantized):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    kind = type(value)
    value = value if isinstance(value, Tensor) else plain_number(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if kind.__name__ == "ndarray" and value.dtype.kind in "biufc":
        tensors.append(torch.tensor(value))
        return {"array": len(tensors) - 1}
    items: list[Any]
    if isinstance(value, Mapping):
        kind = dict if isinstance(value, defaultdict) else kind
        form, items = "dict", [[_tree(item, tensors) for item in pair] for pair in value.items()]
    elif isinstance(value, list | tuple):
        form = "list" if isinstance(value, list) else "tuple"
        items = [_tree(item, tensors) for item in value]
    elif dataclasses.is_dataclass(kind):
        names = (field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        form, items = "fields", [[name, _tree(getattr(value, name), tensors)] for name in names]
    else:
        label = f"tensor of {value.layout}" if isinstance(value, Tensor) else kind.__qualname__
        raise UserError(
            f"predict_step returned a {label}, which ranks cannot exchange and files cannot hold: "
            "return dense tensors, numbers, text and None, in dicts, lists, tuples or dataclasses"
        )
    name = f"{kind.__module__}:{kind.__qualname__}"
    if collectives.world_size() > 1 and _class(name) is not kind:
        problem = f"predict_step returned a {kind.__qualname__}, which other ranks cannot find"
        raise UserError(f"{problem}: define the class at the top of its module")
    return [name, form, items]


def _class(name: str) -> Any:
    """A class of a module that is imported already; ``None`` if it is not there."""
    module, _, path = name.partition(":")
    try:
        return operator.attrgetter(path)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


def _unpack(tree: Any, tensors: Sequence[Tensor], *, is_plain: bool = False) -> Any:
    unpack = partial(_unpack, tensors=tensors, is_plain=is_plain)
    if isinstance(tree, dict):
        ((label, index),) = tree.items()
        return tensors[index].numpy() if label == "array" and not is_plain else tensors[index]
    if not isinstance(tree, list):
        return tree
    name, form, items = tree
    kind = {"list": list, "tuple": tuple}.get(form, dict) if is_plain else _class(name)
    if form == "fields" and not is_plain:
        made = object.__new__(kind)
        for field, item in items:  # it may be frozen
            object.__setattr__(made, field, unpack(item))
        return made
    if form in ("dict", "fields"):
        return kind([[unpack(key), unpack(item)] for key, item in items])
    values = [unpack(item) for item in items]
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def _tensors(content: Tensor, forms: Sequence[Any]) -> list[Tensor]:
    tensors, end = [], 0
    for name, shape in forms:
        dtype = getattr(torch, name.removeprefix("torch."))
        start, end = end, end + math.prod(shape) * dtype.itemsize
        tensors.append(content[start:end].clone().view(dtype).view(shape))
    return tensors
