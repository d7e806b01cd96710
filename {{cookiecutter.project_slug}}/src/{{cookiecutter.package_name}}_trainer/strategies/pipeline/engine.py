"""Runs the stages of a process: forwards, backwards and messages, in the order of a schedule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._pytree import tree_map

from ...memory import activation_checkpointing
from . import partition
from .boundary import Boundary
from .messages import Messages, Values, changeable
from .processes import Processes
from .schedules import Action, Kind


@dataclass(frozen=True)
class Step:
    """The user's step on a micro-batch.

    Args:
        run: Runs it, and returns its result.
        context: Context of a stage's forward: autocast.
        loss: Gets what to call backward on from the step's result.
        seed: Seed of its random numbers before ``sequential_module``; ``None``: not seeded.
        samples: Its number of samples; ``None``: that of the batch.
        checkpointed: Whether stages recompute their activations.
    """

    run: Callable[[], Any]
    context: Callable[[], AbstractContextManager[Any]]
    loss: Callable[[Any], Tensor]
    seed: int | None = None
    samples: int | None = None
    checkpointed: bool = False


class _Kept(NamedTuple):
    """What a forward keeps for its backward; on the last stage, the output is the loss."""

    inputs: Values
    outputs: Values


class Engine:
    """The stages of this process.

    Args:
        processes: The processes of the pipeline.
        parts: The modules of its stages.
        outside: Finds the parameters outside ``sequential_module``, which the last stage may use.
        boundary: Where the user's step enters and leaves the pipeline.
        messages: Connections to the neighbors.
    """

    def __init__(
        self,
        processes: Processes,
        parts: Mapping[int, nn.Sequential],
        outside: Callable[[], Iterable[nn.Parameter]],
        boundary: Boundary,
        messages: Messages,
    ) -> None:
        self._processes = processes
        self._parts = parts
        self._outside = outside
        self._boundary = boundary
        self._messages = messages
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._groups: dict[tuple[int, int], Any] = {}

    def train(self, actions: Sequence[Action], steps: Sequence[Step]) -> None:
        """Run forward and backward of all micro-batches."""
        for kind, stage, number in actions:
            if kind is Kind.FORWARD:
                self._forward_to_train(stage, number, steps[number])
            elif kind is Kind.BACKWARD:
                self._backward(stage, number)
            elif kind is Kind.INPUTS:
                self._backward_inputs(stage, number)
            else:
                self._backward_weights(stage, number)
        self._messages.finish()

    def evaluate(self, step: Step) -> Any:
        """Run a step on a batch, in the stages of this process.

        Returns:
            The step's result on the process with the last stage, ``None`` on others.
        """
        result = None
        for stage in self._processes.own_stages:
            outputs, result = self._forward(stage, step)[1:]
            # A process may be one batch ahead of the next one.
            self._messages.finish()
            if outputs is not None:
                self._messages.send(outputs, stage, 0)
        return result

    def close(self) -> None:
        """Forget a step that has failed, and drop the connections."""
        self._kept.clear()
        self._groups.clear()
        self._messages.close()

    # --- forward -------------------------------------------------------------------------------

    def _forward_to_train(self, stage: int, number: int, step: Step) -> None:
        inputs, outputs, result = self._forward(stage, step)
        if outputs is None:
            outputs = Values((step.loss(result),), is_tuple=False)
        else:
            self._messages.send(outputs, stage, number)
        self._kept[stage, number] = _Kept(inputs, outputs)

    def _forward(self, stage: int, step: Step) -> tuple[Values, Values | None, Any]:
        """Run a stage: return its inputs from another stage, its outputs for another one, and on
        the last stage the result of the user's step."""
        nothing = Values((), is_tuple=True)
        if stage == self._processes.stages - 1:
            received = nothing

            def compute(given: tuple[Any, ...]) -> Any:
                nonlocal received
                if stage > 0:
                    received = self._messages.receive(stage)
                    given = self._arguments(stage, received, step)
                return self._call(stage, given, step)

            result = self._boundary.outputs(step.run, compute, step.seed, step.samples)
            return received, None, result
        if stage == 0:
            received = nothing
            given = self._boundary.inputs(step.run, step.seed)
        else:
            received = self._messages.receive(stage)
            given = self._arguments(stage, received, step)
        with step.context():
            output = self._call(stage, given, step)
        name = list(self._parts[stage]._modules)[-1]
        return received, Values.read(output, f"sequential_module.{name}"), None

    def _arguments(self, stage: int, received: Values, step: Step) -> tuple[Any, ...]:
        if not step.checkpointed:
            received = received._replace(tensors=tuple(map(changeable, received.tensors)))
        return partition.arguments(self._parts[stage], received)

    def _call(self, stage: int, given: tuple[Any, ...], step: Step) -> Any:
        part = self._parts[stage]
        part.training = self._boundary.is_training
        if not step.checkpointed:
            return part(*given)

        def run(*inputs: Any) -> Any:
            # A stage that begins with an operation in place changes what it is computed from again.
            return part(*tree_map(_copy, inputs))

        return activation_checkpointing.recomputed(part, run, *given)

    # --- backward ------------------------------------------------------------------------------

    def _gradients(self, outputs: Values, stage: int, number: int) -> list[Tensor] | None:
        if stage == self._processes.stages - 1:
            return None
        return self._messages.receive_gradients(outputs, stage, number)

    def _backward(self, stage: int, number: int) -> None:
        inputs, outputs = self._kept.pop((stage, number))
        gradients = self._gradients(outputs, stage, number)
        if outputs.differentiable:
            torch.autograd.backward(outputs.differentiable, gradients)
        if stage > 0:
            self._messages.send_gradients(inputs, stage, number)

    def _backward_inputs(self, stage: int, number: int) -> None:
        inputs, outputs = self._kept[stage, number]
        if stage == 0 or not inputs.differentiable:
            self._backward(stage, number)
            return
        del self._kept[stage, number]
        gradients = self._gradients(outputs, stage, number)
        # They are detached in place, which is not possible for views.
        differentiable = [
            each.clone() if each._is_view() else each for each in outputs.differentiable
        ]
        _, groups = stage_backward_input(
            differentiable, gradients, list(inputs.tensors), self._weights(stage)
        )
        self._groups[stage, number] = groups
        self._messages.send_gradients(inputs, stage, number)

    def _backward_weights(self, stage: int, number: int) -> None:
        groups = self._groups.pop((stage, number), None)
        if groups is not None:
            stage_backward_weight(self._weights(stage), groups)

    def _weights(self, stage: int) -> Iterator[nn.Parameter]:
        found = {id(each): each for each in self._parts[stage].parameters()}
        if stage == self._processes.stages - 1:
            found |= {id(each): each for each in self._outside()}
        return iter([each for each in found.values() if each.requires_grad])


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
