"""Run the stage of a process, in the order of one of torch's schedules.

The user's step runs on both ends: it enters and leaves the pipeline at ``sequential_module``.

Sources: https://docs.pytorch.org/docs/stable/distributed.pipelining.html; GPipe
(https://arxiv.org/abs/1811.06965), 1F1B (https://arxiv.org/abs/2006.09503).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ....data import randomness
from ....errors import UserError
from ....memory import activation_checkpointing
from ....module import TrainingModule
from ...precision import Precision
from .activations import Spec, Uses, alias, pack, unpack
from .partition import ATTRIBUTE, Processes, arguments

_KEPT = 4  # schedules of the latest shapes of batches: each holds the tensors that it receives
# Errors of torch, and what a pipeline has to do with them.
_CHANGED = "modified by an inplace operation"
_EXPLAINED = {
    _CHANGED: "a stage changes a tensor in place, such as a buffer in a forward, that the backward "
    "of an earlier micro-batch needs: compute with its clone(), or set microbatches to 1",
    "not have been used in the graph": "training_step asks for a gradient with respect to what "
    "enters a pipeline, whose first stage is on another process: use strategy='ddp'",
}
Compute = Callable[[tuple[Any, ...]], Any]  # of inputs of ``sequential_module``: its output


@dataclass(frozen=True)
class Step:
    run: Callable[[], Any]  # returns, in training, what to call backward on
    seed: int | None = None  # of random numbers before ``sequential_module``, if any
    samples: float | None = None  # what it counts; ``None``: what the batch does
    checkpointed: bool = False  # stages recompute their activations


class _Reached(BaseException):
    """Ends a step on the first stage; the user's ``except Exception`` does not catch it."""


def _stop(inputs: tuple[Any, ...]) -> Any:
    raise _Reached(*inputs)


class Boundary:
    """Replaces the call of ``sequential_module`` in a step until :meth:`close`.

    A step gets the seed of the random numbers before the call, which are the same on the first and
    the last process. ``device``: whose random numbers it may draw.
    """

    def __init__(self, module: TrainingModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self._sequential: nn.Module = getattr(module, ATTRIBUTE)
        self._compute: Compute | None = None
        self._calls = 0
        self._before: ExitStack = ExitStack()
        vars(self._sequential)["forward"] = self._forward

    def close(self) -> None:
        vars(self._sequential).pop("forward", None)

    def _forward(self, *inputs: Any) -> Any:
        if self._compute is None:
            raise UserError(f"{ATTRIBUTE} is called outside of a step; call it in a step")
        self._calls += 1
        if self._calls > 1:
            advice = "a pipeline runs it once: use strategy='fsdp'"
            raise UserError(f"a step calls {ATTRIBUTE} twice; {advice}")
        self._before.close()
        return self._compute(inputs)

    def inputs(self, step: Step) -> tuple[Any, ...]:
        """Run a step until it calls ``sequential_module``; return what it gives to it."""
        logging = [layer for layer in self._module.modules() if isinstance(layer, TrainingModule)]
        for layer in logging:  # the process with the last stage logs
            vars(layer)["log"] = lambda *_, **__: None
        inputs: tuple[Any, ...] = ()
        try:
            self.outputs(step, _stop)
        except _Reached as reached:
            inputs = reached.args
        finally:
            for layer in logging:
                del vars(layer)["log"]
        return inputs

    def outputs(self, step: Step, compute: Compute) -> Any:
        """Run a step in which ``compute`` replaces ``sequential_module``."""
        module, state = self._module, self._module.trainer_state
        module.trainer_state = replace(state, samples=step.samples)
        self._compute, self._calls = compute, 0
        try:
            with ExitStack() as self._before:
                if step.seed is not None:
                    self._before.enter_context(self.seeded(step.seed))
                outputs = step.run()
        finally:
            self._compute, module.trainer_state = None, state
        if not self._calls:
            problem = f"a step did not call self.{ATTRIBUTE}; call it, not its children"
            raise UserError(f"{type(self._module).__name__}: {problem}")
        return outputs

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw the random numbers in this context from a seed."""
        with randomness.Stream(seed), ExitStack() as stack:
            if self._device.type != "cpu":
                gpu: Any = torch.get_device_module(self._device)
                stack.callback(gpu.set_rng_state, gpu.get_rng_state(self._device), self._device)
                gpu.manual_seed(seed)
            yield


class _Module(nn.Module):
    """What torch's schedules call; ``owner`` has the parameters that it may use."""

    def __init__(self, owner: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.owner, self.forward = owner, run


class OwnStage:
    """The stage of this process, which is a ``part`` of ``sequential_module``."""

    def __init__(
        self,
        module: TrainingModule,
        layers: nn.Sequential,
        processes: Processes,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self._module, self._part, self._processes = module, layers, processes
        self._precision, self._device = precision, device
        self._boundary = Boundary(module, device)
        self._group = processes.among(range(processes.count))
        self._name = f"{ATTRIBUTE}.{list(layers._modules)[-1]}"
        self._schedules: dict[Hashable, tuple[Any, Spec | None, Spec | None]] = {}
        self._received: Spec | None = None
        self._given: Spec | None = None
        self._uses: dict[Spec, Uses] = defaultdict(Uses)
        self._steps: Iterator[Step] = iter(())  # the micro-batches that are not begun
        self._loss = torch.zeros(())
        self._open_links()

    def _open_links(self) -> None:
        """Open the links to the neighbors, in the same order on all processes.

        NCCL would open each in the first step, where a process waits until its peer comes to it.
        """
        dist.all_reduce(value := torch.zeros(1, device=self._device), group=self._group)
        for index in range(self._processes.count - 1):
            sender, receiver = (self._processes.rank_at(index + ahead) for ahead in (0, 1))
            if dist.get_rank() == sender:
                dist.send(value, receiver, self._group)
            elif dist.get_rank() == receiver:
                dist.recv(value, sender, self._group)

    def train(self, schedule: str, steps: Sequence[Step], shapes: Hashable) -> None:
        """Run forward and backward of all micro-batches, by the schedule ``gpipe`` or ``1f1b``.

        ``shapes``: equal for batches with which stages exchange tensors of the same shapes.
        """
        key = (schedule, len(steps), shapes)
        if key not in self._schedules:
            buffers = activation_checkpointing.buffers_kept(self._module)
            with buffers, self._boundary.seeded(0), torch.enable_grad():
                self.evaluate(steps[0], to_end=False)
            while len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._schedule(schedule, len(steps)), self._received, self._given
        made, self._received, self._given = self._schedules[key]
        self._steps, numbers = iter(steps), torch.arange(len(steps))
        arguments = (numbers,) if self._processes.has_first else ()
        target = numbers if self._processes.has_last else None
        try:
            # Copies of weights are kept for all micro-batches; autocast is off outside of forwards.
            with self._precision.autocast(), torch.autocast(self._device.type, enabled=False):
                made.step(*arguments, target=target)
        except RuntimeError as error:
            self._schedules.clear()
            cause = error.__cause__ or error  # torch describes the inputs in an error of its own
            for sign, line in _EXPLAINED.items():
                if sign in str(cause) and (len(steps) > 1 or sign != _CHANGED):
                    raise UserError(line) from cause
            raise cause from None

    def _schedule(self, name: str, count: int) -> Any:
        from torch.distributed import pipelining  # takes a second

        position, last = self._processes.position, self._processes.count - 1
        received, inputs = (
            None if spec is None else spec.empty("meta").requires_grad_()
            for spec in (self._received, self._given)
        )
        stage = pipelining.PipelineStage(
            _Module(self._module, self._next),
            position,
            self._processes.count,
            self._device,
            torch.zeros(1, dtype=torch.int64) if received is None else received,
            torch.zeros(1) if inputs is None else inputs,
            group=self._group,
        )
        stage.group_rank = position  # torch numbers processes by stages, and rank 0 has the last
        options: Any = {"loss_fn": lambda output, target: self._loss, "scale_grads": False}
        if count <= last:
            # All forwards, then all backwards; before 2.13 torch's gpipe needs more micro-batches.
            schedule: Any = pipelining.ScheduleLoopedBFS([stage], count, **options)
        elif name == "gpipe":
            schedule = pipelining.ScheduleGPipe(stage, count, **options)
        else:
            schedule = pipelining.Schedule1F1B(stage, count, **options)
        stage.group_rank = dist.get_rank(self._group)
        stage.stage_index_to_group_rank = {index: last - index for index in range(last + 1)}
        return schedule

    def _next(self, received: Tensor) -> Tensor:
        output = self._run(received, next(self._steps))
        if self._processes.has_first:
            received = torch.zeros((), device=self._device, requires_grad=True)
        if self._processes.has_last:
            self._loss = alias(output, received)
            return torch.zeros(1, device=self._device)
        spec = Spec.of(output, self._name)
        if (first := self._given) is not None and spec != first:
            raise UserError(
                f"{self._name} gives tensors of other shapes or types than for the first "
                f"micro-batch: {spec.tensors}, not {first.tensors}; between stages they may depend "
                "only on the shapes of the batch: pad its samples equally"
            )
        return alias(pack(output, spec, self._device, self._uses[spec]), received)

    def evaluate(self, step: Step, *, to_end: bool = True) -> Any:
        """Run a step after the stages before; return its result on the last, if ``to_end``."""
        received = torch.zeros(()) if self._processes.has_first else self._receive()
        if self._processes.has_last:
            return self._run(received, step) if to_end else None
        return self._send(self._run(received, step))

    def _send(self, output: Any) -> None:
        self._given = spec = Spec.of(output, self._name)
        text = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
        packed = pack(output, spec, self._device, Uses())
        for tensor in (torch.tensor([len(text)]), text, packed.detach()):
            dist.send(tensor, self._processes.rank_at(self._processes.position + 1), self._group)

    def _receive(self) -> Tensor:
        source = self._processes.rank_at(self._processes.position - 1)
        dist.recv(length := torch.zeros(1, dtype=torch.int64), source, self._group)
        dist.recv(text := torch.empty(int(length), dtype=torch.uint8), source, self._group)
        self._received = spec = Spec.from_json(json.loads(bytes(text.tolist())))
        dist.recv(flat := spec.empty(self._device), source, self._group)
        return flat.requires_grad_(torch.is_grad_enabled())

    def _run(self, received: Tensor, step: Step) -> Any:
        """Run the stage: return its output; of the last stage, the result of the user's step."""
        layers = self._part

        def compute(values: tuple[Any, ...]) -> Any:
            layers.training = getattr(self._module, ATTRIBUTE).training
            if self._received is not None:
                values = arguments(layers, unpack(received, self._received))
            if not step.checkpointed:
                return layers(*values)
            return activation_checkpointing.recomputed(layers, recompute, *values)

        def recompute(*inputs: Any) -> Any:
            # A stage that begins with an operation in place changes what it is computed from again.
            return layers(*tree_map_only(Tensor, Tensor.clone, inputs))

        if self._processes.has_last:
            return self._boundary.outputs(step, compute)
        values = self._boundary.inputs(step) if self._processes.has_first else ()
        with self._precision.autocast():
            return compute(values)

    def close(self) -> None:
        """Drop what a failed step has left, and the connections; restore the module."""
        self._boundary.close()
        self._schedules.clear()
        self._steps, self._group = iter(()), None
