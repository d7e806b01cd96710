"""Hashes of steps, in which two runs can be compared: ``hashes/rank-NNNNN.jsonl``, one per rank.

A line has the ``step`` and hashes of what this rank has of the ``data`` (the batches, in order),
the ``loss``, the ``gradients`` before the step, the ``options`` of the optimizers, and after the
step the ``weights`` with buffers, the ``optimizer`` and the ``random`` state. Gradients that an
engine keeps elsewhere than in the parameters count as none. Nothing is sent between ranks.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO

import numpy as np
import torch
from torch import Tensor

from ..data import MicroBatch, moving, randomness
from ..errors import one_line
from ..launch import collectives
from ..strategies.optimizers import Optimization
from . import tensor_hash
from .parts import FitParts
from .tensor_hash import TensorHash

DIRECTORY = "hashes"
P = ParamSpec("P")
_STEP = re.compile(rb'{"step": (\d+),')


def truncate(run: Path, step: int) -> None:
    """Remove the hashes of all ranks after a step, from which a run is resumed."""
    for path in (run / DIRECTORY).glob("rank-*.jsonl"):
        end = 0
        with path.open("rb+") as file:
            for line in file:
                number = _STEP.match(line)
                if number is None or not line.endswith(b"\n") or int(number[1]) > step:
                    break
                end += len(line)
            file.truncate(end)


def _stopping(
    method: "Callable[Concatenate[StepHashes, P], None]",
) -> "Callable[Concatenate[StepHashes, P], None]":
    """An error in a method must not end training: hashes are not recorded any more."""

    def called(self: "StepHashes", /, *arguments: P.args, **keywords: P.kwargs) -> None:
        try:
            method(self, *arguments, **keywords)
        except Exception as error:  # a tensor may be of a class that has none
            self.is_due = self.is_open = False
            why = f"{type(error).__name__}: {one_line(error)}"
            line = f"warning: hashes of steps are not recorded any more: {why}"
            print(line, file=sys.stderr, flush=True)

    return called


class StepHashes:
    """Records the hashes of this rank's steps; ``fit``: the parts of the fit.

    ``is_due``: whether the current step is recorded, which the loop decides: the step is logged,
    or the ``last``, or all are recorded.
    """

    def __init__(self, fit: FitParts) -> None:
        self._fit = fit
        self.last: int | None = None
        self._hashes: dict[str, TensorHash] = defaultdict(TensorHash)
        self._file: TextIO | None = None
        self.is_open = self.is_due = False

    @_stopping
    def open(self, run: Path, total_steps: int | None) -> None:
        """Record steps from now on, into a run directory, whose earlier files are kept.

        A new run begins with the weights and the random state before its first step, as step 0.
        """
        options, limits = self._fit.options, self._fit.strategy.limits
        self.is_open = options.record_hashes is True or (
            # A strategy that compiles its steps would compile another one for those with hashes.
            options.record_hashes is None and not (options.fast_dev_run or limits.compiles_steps)
        )
        self._path = run / DIRECTORY / f"rank-{collectives.rank():05}.jsonl"
        self.last = total_steps
        if self.is_open and self._fit.position.global_step == 0:
            self.write(0)

    @_stopping
    def note_batch(self, batch: MicroBatch) -> None:
        """Hash a micro-batch; the host does not wait for the device."""
        own = self._hashes["data"]
        own.add_text(batch.number, batch.samples, batch.weight)
        own.add(_tensors(batch.data, own))

    @_stopping
    def note_losses(self, losses: Sequence[Tensor]) -> None:
        """Hash the losses of a micro-batch."""
        self._hashes["loss"].add(losses)

    @_stopping
    def note_gradients(self, optimization: Optimization, factor: float) -> None:
        """Hash gradients and options, before optimizers step at ``factor`` times their rates."""
        options = self._hashes["options"]
        options.add_text(factor)
        for group in (group for each in optimization.optimizers for group in each.param_groups):
            given = {name: group[name] for name in sorted(group) if name != "params"}
            options.add(_tensors(given, options))
        if optimization is self._fit.optimization:
            parameters: Iterable[Tensor] = self._parameters()
        else:  # one of several, in manual optimization
            parameters = optimization.parameters
        self._hashes["gradients"].add([each.grad for each in parameters])

    @_stopping
    def write(self, step: int) -> None:
        """Write the hashes of a step that is made; the host waits for the device."""
        names = ("data", "loss", "gradients", "weights", "optimizer", "options")
        hashes, self._hashes = self._hashes, defaultdict(TensorHash)
        with torch.no_grad():
            weights = self._fit.strategy.weights()
            hashes["weights"].add(weights.shards(weights.parameters))
        hashes["weights"].add(self._fit.module.buffers())
        own = set(map(id, self._fit.module.parameters()))
        for optimizer in self._fit.optimization.optimizers:
            hashes["optimizer"].add(_state(optimizer, own, hashes["optimizer"]))
        found = tensor_hash.read(hashes)
        line = {"step": step, **{name: found.get(name) for name in names}}
        line["random"] = randomness.digest(self._fit.strategy.data.devices)
        if self._file is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("a")
        self._file.write(f"{json.dumps(line)}\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; the next step opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _parameters(self) -> Iterable[Tensor]:
        return self._fit.strategy.weights().parameters.values()


def _state(optimizer: Any, own: Set[int], of: TensorHash) -> Iterator[Tensor]:
    """What an optimizer has in this process: its state, and parameters that are not the module's.

    ``own``: the ``id`` of the module's.
    """
    optimizer = getattr(optimizer, "optim", optimizer)  # a sharded optimizer's own shard
    given = [each for group in optimizer.param_groups for each in group["params"]]
    # Some engines step other tensors than those in the groups.
    for parameter in dict.fromkeys([*given, *optimizer.state]):
        if id(parameter) not in own:
            yield parameter
        values: Mapping[str, Any] = optimizer.state.get(parameter, {})
        yield from _tensors({name: values[name] for name in sorted(values)}, of)


def _tensors(values: Any, of: TensorHash) -> Iterator[Tensor]:
    """The tensors in values of any nesting; numbers and texts are added to a hash."""
    for each in moving.leaves(values):
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, np.ndarray) and each.dtype != object:
            of.add_text(str(each.dtype), each.shape, each.tobytes())
        elif each is None or isinstance(each, str | bytes | int | float | complex):
            of.add_text(each)
        elif isinstance(each, tuple):  # a packed sequence
            yield from (part for part in each if isinstance(part, Tensor))
        elif callable(to_dict := getattr(each, "to_dict", None)):  # a graph
            yield from _tensors(to_dict(), of)
        else:
            of.add_text(type(each).__name__)
