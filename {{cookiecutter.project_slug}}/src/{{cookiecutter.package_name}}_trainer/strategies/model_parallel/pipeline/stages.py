"""Run the stages of a process, in the order of one of torch's schedules.

Sources: https://docs.pytorch.org/docs/stable/distributed.pipelining.html; GPipe
(https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/2006.09503), interleaved 1F1B
(https://arxiv.org/abs/2104.04473), zero bubble (https://arxiv.org/abs/2401.10241).
"""

import contextlib
import functools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from .activations import Spec, alias, pack, unpack
from .boundary import Boundary
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


@dataclass(frozen=True)
class Step:
    """The user's step on a micro-batch."""

    run: Callable[[], Any]
    loss: Callable[[Any], Tensor]
    """Gets what to call backward on from the step's result."""
    seed: int | None = None
    """Seed of its random numbers before ``sequential_module``; ``None``: not seeded."""
    samples: int | None = None
    """Its number of samples; ``None``: that of the batch."""
    checkpointed: bool = False
    """Whether stages recompute their activations."""


class _Stage(nn.Module):
    """A stage for torch's schedules; ``owner`` has further parameters that it may use."""

    def __init__(self, part: nn.Module, owner: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.owner, self.run = part, owner, run

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
        self._steps: dict[int, Iterator[Step]] = {}
        """The micro-batches that each stage has not begun."""
        self._loss = torch.zeros(())

    def train(self, schedule: str, steps: Sequence[Step], shapes: Hashable) -> None:
        """Run forward and backward of all micro-batches.

        Args:
            schedule: One of :data:`SCHEDULES`.
            steps: The user's step on each micro-batch.
            shapes: Equal for batches with which stages exchange tensors of the same shapes.
        """
        key = (schedule, len(steps), shapes)
        if key not in self._schedules:
            self._specs = self._exchange_specs(steps[0])
            while len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._schedule(schedule, len(steps)), self._specs
        made, self._specs = self._schedules[key]
        self._steps = {index: iter(steps) for index in self._parts}
        numbers = torch.arange(len(steps))
        arguments = (numbers,) if self._processes.has_first else ()
        target = numbers if self._processes.has_last else None
        try:
            with self._weights_cast_once():
                made.step(*arguments, target=target)
        except RuntimeError as error:
            self._schedules.clear()
            # torch describes the stage's inputs in an error of its own.
            raise error.__cause__ or error from None

    @contextlib.contextmanager
    def _weights_cast_once(self) -> Iterator[None]:
        """Keep autocast's copies of weights for all micro-batches; it is off outside forwards."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._precision.autocast())
            if self._precision.dtype is not None:
                stack.enter_context(torch.autocast(self._device.type, enabled=False))
            yield

    def _exchange_specs(self, step: Step) -> dict[int, Spec]:
        """Run a micro-batch up to the last stage, to learn what stages receive and give."""
        specs = {}
        buffers = activation_checkpointing.buffers_kept(self._module)
        with buffers, self._boundary.seeded(0), torch.enable_grad():
            for index in self._parts:
                received = self._receive(index)
                if received is not None:
                    specs[index] = received[0]
                if index < self._processes.stages - 1:
                    specs[index + 1] = self._send(index, self._run(index, received, step))
        return specs

    def _schedule(self, name: str, count: int) -> Any:
        from torch.distributed import pipelining  # takes a second

        made = []
        for index, part in self._parts.items():
            is_last = index == self._processes.stages - 1
            stage = pipelining.PipelineStage(
                _Stage(part, self._module, functools.partial(self._next, index)),
                index,
                self._processes.stages,
                self._device,
                _example(self._specs[index]) if index else torch.zeros(1, dtype=torch.int64),
                torch.zeros(1) if is_last else _example(self._specs[index + 1]),
                group=self._group,
            )
            # torch numbers the processes by their stages, and rank 0 has the last one.
            stage.group_rank = self._processes.position
            made.append(stage)
        if name == "1f1b" and count < self._processes.stages:
            name = "gpipe"  # as torch requires
        is_single = name in ("gpipe", "1f1b")  # of one stage per process
        found = getattr(pipelining, SCHEDULES[name])(
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
        output = self._run(index, (self._specs[index], received) if index else None, step)
        source = received if index else torch.zeros((), device=self._device, requires_grad=True)
        if index == self._processes.stages - 1:
            self._loss = alias(step.loss(output), source)
            return torch.zeros(1, device=self._device)
        spec = Spec.of(output, self._name(index))
        if spec != self._specs[index + 1]:
            raise UserError(
                f"{self._name(index)} gives tensors of other shapes or types than for the "
                f"first micro-batch: {spec.tensors}, not {self._specs[index + 1].tensors}; between "
                "stages they may depend only on the shapes of the batch: pad its samples equally"
            )
        return alias(pack(output, spec, self._device), source)

    def evaluate(self, step: Step) -> Any:
        """Run a step on a batch; return its result on the process with the last stage."""
        for index in self._parts:
            output = self._run(index, self._receive(index), step)
            if index == self._processes.stages - 1:
                return output
            self._send(index, output)
        return None

    def _send(self, index: int, output: Any) -> Spec:
        """Send what a stage gives to the next one, and its description."""
        spec = Spec.of(output, self._name(index))
        text = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
        to = self._processes.rank_at((index + 1) % self._processes.count)
        for each in (torch.tensor([len(text)]), text, pack(output, spec, self._device).detach()):
            dist.send(each, to, self._group)
        return spec

    def _receive(self, index: int) -> tuple[Spec, Tensor] | None:
        """Receive what the stage before gives, if there is one."""
        if index == 0:
            return None
        source = self._processes.rank_at((index - 1) % self._processes.count)
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source, self._group)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source, self._group)
        spec = Spec.from_json(json.loads(bytes(text.tolist())))
        flat = spec.empty(self._device)
        dist.recv(flat, source, self._group)
        return spec, flat.requires_grad_(torch.is_grad_enabled())

    def _name(self, index: int) -> str:
        return f"{partition.ATTRIBUTE}.{list(self._parts[index]._modules)[-1]}"

    def _run(self, index: int, received: tuple[Spec, Tensor] | None, step: Step) -> Any:
        """Run a stage: return its output; of the last stage, the result of the user's step."""
        part = self._parts[index]

        def compute(given: tuple[Any, ...]) -> Any:
            part.training = getattr(self._module, partition.ATTRIBUTE).training
            if received is not None:
                spec, flat = received
                given = partition.arguments(part, unpack(flat, spec))
            if not step.checkpointed:
                return part(*given)
            return activation_checkpointing.recomputed(part, recompute, *given)

        def recompute(*inputs: Any) -> Any:
            # A stage that begins with an operation in place changes what it is computed from again.
            return part(*tree_map_only(Tensor, Tensor.clone, inputs))

        if index == self._processes.stages - 1:
            return self._boundary.outputs(step.run, compute, step.seed, step.samples)
        given = self._boundary.inputs(step.run, step.seed) if received is None else ()
        with self._precision.autocast():
            return compute(given)

    def close(self) -> None:
        """Drop what a failed step has left, and the connections; restore the module."""
        self._boundary.close()
        self._schedules.clear()
        self._steps, self._group = {}, None


def _example(spec: Spec) -> Tensor:
    return spec.empty("meta").requires_grad_()
