"""Hashes of steps, in which two runs can be compared: ``hashes/rank-NNNNN.jsonl``, one per rank.

A line has the ``step`` and hashes of what this rank has of the ``data`` (the batches, in order),
the ``loss``, the ``gradients`` before the step, the ``options`` of the optimizers, and after the
step the ``weights`` with buffers, the ``optimizer`` and the ``random`` state. Gradients that an
engine keeps elsewhere than in the parameters count as none. Nothing is sent between ranks.
"""

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import MicroBatch, randomness
from ..data.hashing import Hash
from ..errors import lost_worker, one_line
from ..launch import collectives, output
from ..strategies.optimizers import Optimization
from .parts import FitParts

DIRECTORY = "hashes"
_LINE = re.compile(rb'{"step": (\d{1,18}),.*}\n')


def truncate(run: Path, step: int) -> None:
    """Remove the hashes of all ranks after a step, from which a run is resumed."""
    for path in filter(Path.is_file, (run / DIRECTORY).glob("rank-*.jsonl")):
        with path.open("rb+") as file:
            lines = iter(partial(file.readline, 2**16), b"")
            steps = ((_LINE.fullmatch(line), len(line)) for line in lines)
            kept = takewhile(lambda pair: pair[0] is not None and int(pair[0][1]) <= step, steps)
            file.truncate(sum(length for _, length in kept))


class StepHashes:
    """Records the hashes of this rank's steps; ``fit``: the parts of the fit.

    ``is_due``: whether the current step is recorded, which the loop decides: if ``is_open``, the
    ``last``, a logged one that :meth:`is_moment`, or any (``is_every``).
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
        by_default = not (options.fast_dev_run or "compile" in limits.always)
        self.is_open = by_default if options.record_hashes is None else options.record_hashes
        self._path = run / DIRECTORY / f"rank-{collectives.rank():05}.jsonl"
        self.last = total_steps
        if self.is_open and self._fit.position.global_step == 0:
            self.write(0)

    def is_moment(self, step: int, ends_epoch: bool) -> bool:
        """Whether to record a step that is logged: ever fewer, so that hashes cost ever less."""
        number, rest = divmod(step, self._fit.options.log_every_n_steps)
        return rest != 0 or number.bit_count() == 1 or (ends_epoch and self.last is None)

    def note_batch(self, batch: MicroBatch, losses: Sequence[Tensor]) -> None:
        """Hash a micro-batch and its losses; the host does not wait for the device."""
        with self._ends_on_error():
            self._hashes["data"].add((batch.number, batch.samples, batch.weight, batch.data))
            self._hashes["loss"].add(losses)

    def note_gradients(self, optimization: Optimization) -> None:
        """Hash gradients, and the options of optimizers, before these step, if it is due."""
        if not self.is_due:
            return
        with self._ends_on_error():
            self._hashes["options"].add(self._fit.outputs.recorder.context.rate_factor)
            for group in (group for opt in optimization.optimizers for group in opt.param_groups):
                self._hashes["options"].add([p for p in sorted(group.items()) if p[0] != "params"])
            self._hashes["gradients"].add([parameter.grad for parameter in optimization.parameters])

    def write(self, step: int) -> None:
        """Write the hashes of a step that is made; the host waits for the device."""
        with self._ends_on_error():
            self._note_state()
            hashes = {name: digest.hexadecimal() for name, digest in self._hashes.items()}
            self._hashes.clear()
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps({'step': step, **hashes})}\n")

    @torch.no_grad()
    def _note_state(self) -> None:
        strategy, module = self._fit.strategy, self._fit.module
        weights, module_ids = strategy.weights(), set(map(id, module.parameters()))
        self._hashes["weights"].add([*weights.shards(weights.parameters), *module.buffers()])
        for optimizer in self._fit.optimization.optimizers:
            self._hashes["optimizer"].add(_state(optimizer, module_ids))
        self._hashes["random"].add(randomness.full_state(strategy.data.devices))

    @contextlib.contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """An error ends the hashes, not training: a tensor may be of a class that has none."""
        try:
            yield
        except Exception as error:
            if lost_worker(error):
                raise
            self.is_open = self.is_due = False
            why = f"{type(error).__name__}: {one_line(error)}"
            line = f"warning: hashes of steps are not recorded any more: {why}"
            output.print_lines(line, error=True)


def _state(optimizer: Any, module_ids: set[int]) -> list[Any]:
    """What an optimizer has here: its state, and parameters that are not the module's."""
    optimizer = getattr(optimizer, "optim", optimizer)  # a sharded optimizer's own shard
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [  # some engines step other tensors than those in the groups
        (None if id(p) in module_ids else p, sorted(optimizer.state.get(p, {}).items()))
        for p in dict.fromkeys([*parameters, *optimizer.state])
    ]
