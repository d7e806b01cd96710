"""Run the stages of a process, in the order of one of torch's schedules.

Sources: https://docs.pytorch.org/docs/stable/distributed.pipelining.html; GPipe
(https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/2006.09503), interleaved 1F1B
(https://arxiv.org/abs/2104.04473), zero bubble (https://arxiv.org/abs/2401.10241).
"""

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ....errors import UserError
from ....memory import activation_checkpointing
from ....module import TrainingModule
from ...precision import Precision
from . import partition
from .activations import Spec, Uses, alias, pack, unpack
from .boundary import Boundary, Step
from .partition import Processes

# Names in torch.distributed.pipelining.
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
# Schedules of the latest shapes of batches: each holds the tensors that it receives.
_KEPT = 4
# Errors of torch, and what a pipeline has to do with them.
_CHANGED = "modified by an inplace operation"
_EXPLAINED = {
    _CHANGED: "a stage changes a tensor in place, such as a buffer in a forward, that the backward "
    "of an earlier micro-batch needs: compute with its clone(), or set microbatches to 1",
    "not have been used in the graph": "training_step asks for a gradient with respect to what "
    "enters a pipeline, whose first stage is on another process: use strategy='ddp'",
}


class _Stage(nn.Module):
    """A stage for torch's schedules; ``owner`` has the parameters that it may use."""

    def __init__(self, owner: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.owner, self.run = owner, run

    def forward(self, received: Tensor) -> Tensor:
        """Run the next micro-batch."""
        return self.run(received)


class Stages:
    """The stages of this process: ``parts`` of ``sequential_module``, by the stages' indices."""

    def __init__(
        self,
        module: TrainingModule,
        parts: Mapping[int, nn.Sequential],
        processes: Processes,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._module, self._parts, self._processes = module, parts, processes
        self._precision, self._device = precision, device
        self._boundary = Boundary(module, device)
        self._group = processes.among(range(processes.count))
        self._schedules: dict[Hashable, tuple[Any, dict[int, Spec]]] = {}
        self._specs: dict[int, Spec] = {}
        """What each stage of this process receives and gives, by the receiving stage."""
        self._uses: dict[tuple[int, Spec], Uses] = defaultdict(Uses)
        self._steps: dict[int, Iterator[Step]] = {}
        """The micro-batches that each stage has not begun."""
        self._loss = torch.zeros(())
        self._open_links()

    def _open_links(self) -> None:
        """Open the links to the neighbors, in the same order on all processes.

        NCCL would open each in the first step, where a process waits until its peer comes to it.
        """
        dist.all_reduce(value := torch.zeros(1, device=self._device), group=self._group)
        for index in range(min(self._processes.stages - 1, self._processes.count)):
            sender, receiver = (self._processes.rank_at(index + ahead) for ahead in (0, 1))
            if dist.get_rank() == sender:
                dist.send(value, receiver, self._group)
            elif dist.get_rank() == receiver:
                dist.recv(value, sender, self._group)

    def train(self, schedule: str, steps: Sequence[Step], shapes: Hashable) -> None:
        """Run forward and backward of all micro-batches, by one of :data:`SCHEDULES`.

        ``shapes``: equal for batches with which stages exchange tensors of the same shapes.
        """
        key = (schedule, len(steps), shapes)
        if key not in self._schedules:
            buffers = activation_checkpointing.buffers_kept(self._module)
            with buffers, self._boundary.seeded(0), torch.enable_grad():
                self.evaluate(steps[0], to_end=False)
            while len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._schedule(schedule, len(steps)), self._specs
        made, self._specs = self._schedules[key]
        self._steps = {index: iter(steps) for index in self._parts}
        numbers = torch.arange(len(steps))
        arguments = (numbers,) if self._processes.has_first else ()
        target = numbers if self._processes.has_last else None
        try:
            # Copies of weights are kept for all micro-batches; autocast is off outside of forwards.
            with self._precision.autocast(), torch.autocast(self._device.type, enabled=False):
                made.step(*arguments, target=target)
        except RuntimeError as error:
            self._schedules.clear()
            # torch describes the stage's inputs in an error of its own.
            cause = error.__cause__ or error
            for sign, line in _EXPLAINED.items():
                if sign in str(cause) and (len(steps) > 1 or sign != _CHANGED):
                    raise UserError(line) from cause
            raise cause from None

    def _schedule(self, name: str, count: int) -> Any:
        from torch.distributed import pipelining  # takes a second

        examples = {to: spec.empty("meta").requires_grad_() for to, spec in self._specs.items()}
        made = []
        for index in self._parts:
            stage = pipelining.PipelineStage(
                _Stage(self._module, functools.partial(self._next, index)),
                index,
                self._processes.stages,
                self._device,
                examples.get(index, torch.zeros(1, dtype=torch.int64)),
                examples.get(index + 1, torch.zeros(1)),
                group=self._group,
            )
            # torch numbers the processes by their stages, and rank 0 has the last one.
            stage.group_rank = self._processes.position
            made.append(stage)
        is_single, schedule = name in ("gpipe", "1f1b"), SCHEDULES[name]  # one stage per process
        if is_single and count < self._processes.stages:
            # All forwards, then all backwards; before 2.13 torch's gpipe needs more micro-batches.
            is_single, schedule = False, "ScheduleLoopedBFS"
        found = getattr(pipelining, schedule)(
            made[0] if is_single else made,
            count,
            loss_fn=lambda output, target: self._loss,
            scale_grads=False,
        )
        for stage in made:
            stage.group_rank = dist.get_rank(self._group)
            stage.stage_index_to_group_rank = {
                index: self._processes.count - 1 - index % self._processes.count
                for index in range(self._processes.stages)
            }
        return found

    def _next(self, index: int, received: Tensor) -> Tensor:
        """Run a stage on its next micro-batch, in training."""
        step = next(self._steps[index])
        output = self._run(index, received, step)
        source = received if index else torch.zeros((), device=self._device, requires_grad=True)
        if index == self._processes.stages - 1:
            self._loss = alias(output, source)
            return torch.zeros(1, device=self._device)
        spec = Spec.of(output, self._name(index))
        if spec != self._specs[index + 1]:
            raise UserError(
                f"{self._name(index)} gives tensors of other shapes or types than for the "
                f"first micro-batch: {spec.tensors}, not {self._specs[index + 1].tensors}; between "
                "stages they may depend only on the shapes of the batch: pad its samples equally"
            )
        return alias(pack(output, spec, self._device, self._uses[index, spec]), source)

    def evaluate(self, step: Step, *, to_end: bool = True) -> Any:
        """Run a step, stage after stage; return its result on the last one, if ``to_end``."""
        self._specs = {}
        for index in self._parts:
            received = self._receive(index) if index else torch.zeros(())
            if index == self._processes.stages - 1:
                return self._run(index, received, step) if to_end else None
            self._send(index, self._run(index, received, step))
        return None

    def _send(self, index: int, output: Any) -> None:
        self._specs[index + 1] = spec = Spec.of(output, self._name(index))
        text = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
        packed = pack(output, spec, self._device, Uses())
        for each in (torch.tensor([len(text)]), text, packed.detach()):
            dist.send(each, self._processes.rank_at(index + 1), self._group)

    def _receive(self, index: int) -> Tensor:
        source, length = self._processes.rank_at(index - 1), torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source, self._group)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source, self._group)
        self._specs[index] = spec = Spec.from_json(json.loads(bytes(text.tolist())))
        dist.recv(flat := spec.empty(self._device), source, self._group)
        return flat.requires_grad_(torch.is_grad_enabled())

    def _name(self, index: int) -> str:
        return f"{partition.ATTRIBUTE}.{list(self._parts[index]._modules)[-1]}"

    def _run(self, index: int, received: Tensor, step: Step) -> Any:
        """Run a stage: return its output; of the last stage, the result of the user's step."""
        part = self._parts[index]

        def compute(given: tuple[Any, ...]) -> Any:
            part.training = getattr(self._module, partition.ATTRIBUTE).training
            if index:
                given = partition.arguments(part, unpack(received, self._specs[index]))
            if not step.checkpointed:
                return part(*given)
            return activation_checkpointing.recomputed(part, recompute, *given)

        def recompute(*inputs: Any) -> Any:
            # A stage that begins with an operation in place changes what it is computed from again.
            return part(*tree_map_only(Tensor, Tensor.clone, inputs))

        if index == self._processes.stages - 1:
            return self._boundary.outputs(step, compute)
        given = () if index else self._boundary.inputs(step)
        with self._precision.autocast():
            return compute(given)

    def close(self) -> None:
        """Drop what a failed step has left, and the connections; restore the module."""
        self._boundary.close()
        self._schedules.clear()
        self._steps, self._group = {}, None
