"""Hashes of steps, in which two runs can be compared: ``hashes/rank-NNNNN.jsonl``, one per rank.

A line has the ``step`` and hashes of what this rank has of the ``data`` (the batches, in order),
the ``loss``, the ``gradients`` before the step, the ``options`` of the optimizers, and after the
step the ``weights`` with buffers, the ``optimizer`` and the ``random`` state. Gradients that an
engine keeps elsewhere than in the parameters count as none. Nothing is sent between ranks.
"""

import functools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import MicroBatch, randomness
from ..errors import one_line
from ..launch import collectives
from ..strategies.optimizers import Optimization
from .parts import FitParts
from .tensor_hash import Hash

DIRECTORY = "hashes"
_LINE = re.compile(rb'{"step": (\d+),.*}\n')


def truncate(run: Path, step: int) -> None:
    """Remove the hashes of all ranks after a step, from which a run is resumed."""
    for path in (run / DIRECTORY).glob("rank-*.jsonl"):
        end = 0
        with path.open("rb+") as file:
            for line in file:
                found = _LINE.fullmatch(line)
                if found is None or int(found[1]) > step:
                    break
                end += len(line)
            file.truncate(end)


def _if_due(method: Callable[..., None]) -> Callable[..., None]:
    """Call a method in recorded steps only; an error in it ends the hashes, not training."""

    @functools.wraps(method)
    def called(self: "StepHashes", *arguments: Any) -> None:
        if not self.is_due:
            return
        try:
            method(self, *arguments)
        except Exception as error:  # a tensor may be of a class that has none
            self.is_open = self.is_due = False
            why = f"{type(error).__name__}: {one_line(error)}"
            line = f"warning: hashes of steps are not recorded any more: {why}"
            print(line, file=sys.stderr, flush=True)

    return called


class StepHashes:
    """Records the hashes of this rank's steps; ``fit``: the parts of the fit.

    ``is_due``: whether the current step is recorded, which the loop decides: if ``is_open``, it is
    one that is logged, the ``last``, or any (``is_every``).
    """

    def __init__(self, fit: FitParts) -> None:
        self._fit = fit
        self._hashes: dict[str, Hash] = defaultdict(Hash)
        self.last: int | None = None
        self.is_open = self.is_due = False
        self.is_every = fit.options.record_hashes is True
        if fit.manual is not None:
            fit.manual.before_step = self.note_gradients

    def open(self, run: Path, total_steps: int | None) -> None:
        """Record steps from now on, into a run directory, whose earlier files are kept.

        A new run begins with the weights and the random state before its first step, as step 0.
        """
        options, limits = self._fit.options, self._fit.strategy.limits
        # A strategy that compiles its steps would compile another one for those with hashes.
        by_default = not (options.fast_dev_run or limits.compiles_steps)
        self.is_open = by_default if options.record_hashes is None else options.record_hashes
        self._path = run / DIRECTORY / f"rank-{collectives.rank():05}.jsonl"
        self.last = total_steps
        self.is_due = self.is_open and self._fit.position.global_step == 0
        self.write(0)

    @_if_due
    def note_batch(self, batch: MicroBatch, losses: Sequence[Tensor]) -> None:
        """Hash a micro-batch and its losses; the host does not wait for the device."""
        self._hashes["data"].add((batch.number, batch.samples, batch.weight, batch.data))
        self._hashes["loss"].add(losses)

    @_if_due
    def note_gradients(self, optimization: Optimization) -> None:
        """Hash gradients, and the options of optimizers, before these step."""
        self._hashes["options"].add(self._fit.outputs.recorder.context.rate_factor)
        for group in (group for each in optimization.optimizers for group in each.param_groups):
            given = sorted(name for name in group if name != "params")
            self._hashes["options"].add([(name, group[name]) for name in given])
        self._hashes["gradients"].add([each.grad for each in optimization.parameters])

    @_if_due
    def write(self, step: int) -> None:
        """Write the hashes of a step that is made; the host waits for the device."""
        strategy, module = self._fit.strategy, self._fit.module
        hashes, self._hashes = self._hashes, defaultdict(Hash)
        weights = strategy.weights()
        with torch.no_grad():
            hashes["weights"].add(list(weights.shards(weights.parameters)))
        hashes["weights"].add(list(module.buffers()))
        for optimizer in self._fit.optimization.optimizers:
            hashes["optimizer"].add(_state(optimizer, set(map(id, module.parameters()))))
        hashes["random"].add(randomness.full_state(strategy.data.devices))
        line = {"step": step, **{name: each.hexadecimal() for name, each in hashes.items()}}
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def _state(optimizer: Any, own: set[int]) -> list[Any]:
    """What an optimizer has in this process: its state, and parameters that are not the module's.

    ``own``: the ``id`` of the module's.
    """
    optimizer = getattr(optimizer, "optim", optimizer)  # a sharded optimizer's own shard
    given = [each for group in optimizer.param_groups for each in group["params"]]
    # Some engines step other tensors than those in the groups.
    return [
        (None if id(each) in own else each, sorted(optimizer.state.get(each, {}).items()))
        for each in dict.fromkeys([*given, *optimizer.state])
    ]
