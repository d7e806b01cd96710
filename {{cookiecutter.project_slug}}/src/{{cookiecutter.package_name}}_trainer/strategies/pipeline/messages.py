"""Send activations and gradients between the stages of a pipeline.

A message says which tensors follow, so that shapes may differ between micro-batches. Sends are
asynchronous, and a receive waits: so the order of actions alone decides when a process waits.
"""

import json
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoint import dtensors
from ...errors import UserError
from .processes import Processes

_HEADER_BYTES = 4096


class Values(NamedTuple):
    """What one stage gives to the next: one tensor, or a tuple of them."""

    tensors: tuple[Tensor, ...]
    is_tuple: bool

    @classmethod
    def read(cls, output: object, where: str) -> "Values":
        """Read the output of a stage.

        Raises:
            UserError: It contains anything but tensors.
        """
        tensors = output if isinstance(output, tuple) else (output,)
        for each in tensors:
            if not isinstance(each, Tensor):
                raise UserError(
                    f"{where} gives a {type(each).__name__} to the next stage; give a tensor or a "
                    "tuple of tensors there, or divide sequential_module elsewhere (balance)"
                )
            if dtensors.is_sharded(each):
                raise UserError(
                    f"{where} gives a DTensor to the next stage; let its style in parallelize_plan "
                    "return local tensors (use_local_output=True)"
                )
        return cls(tuple(tensors), isinstance(output, tuple))

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that require a gradient."""
        return [each for each in self.tensors if each.requires_grad]


class Messages:
    """The connections of this process to its neighbors.

    Args:
        processes: The processes of the pipeline.
        device: Device of the tensors.
    """

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self._processes = processes
        self._device = device
        self._sent: dict[tuple[int, int], list[tuple[dist.Work, Tensor]]] = {}

    def send(self, values: Values, stage: int, number: int) -> None:
        """Send the outputs of a micro-batch to the next stage."""
        described = [
            [str(each.dtype)[6:], each.requires_grad, list(each.shape)] for each in values.tensors
        ]
        text = json.dumps([values.is_tuple, described]).encode()
        if len(text) > _HEADER_BYTES:
            raise UserError(f"a stage gives {len(described)} tensors to the next one: too many")
        header = torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)
        for each in (header, *values.tensors):
            self._send(each, stage, stage + 1, number)

    def receive(self, stage: int) -> Values:
        """Receive the inputs of a micro-batch from the stage before; they are leaves."""
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._receive(header, stage - 1, stage)
        is_tuple, described = json.loads(bytes(header.tolist()))
        tensors = []
        for dtype, requires_grad, shape in described:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._receive(tensor, stage - 1, stage)
            tensors.append(tensor.requires_grad_(requires_grad and torch.is_grad_enabled()))
        return Values(tuple(tensors), is_tuple)

    def send_gradients(self, inputs: Values, stage: int, number: int) -> None:
        """Send the gradients of a micro-batch's inputs to the stage before."""
        for each in inputs.differentiable:
            gradient = torch.zeros_like(each) if each.grad is None else each.grad
            each.grad = None
            self._send(gradient, stage, stage - 1, number)

    def receive_gradients(self, outputs: Values, stage: int, number: int) -> list[Tensor]:
        """Receive the gradients of a micro-batch's outputs from the next stage."""
        gradients = [torch.empty_like(each) for each in outputs.differentiable]
        for each in gradients:
            self._receive(each, stage + 1, stage)
        if gradients:  # then the outputs have arrived
            self._finish(stage, number)
        return gradients

    def _send(self, tensor: Tensor, source: int, to: int, number: int) -> None:
        tensor = tensor.detach().contiguous()
        rank = self._processes.rank_at(self._processes.position_of(to))
        work = dist.isend(tensor, rank, self._group(source, to), tag=_tag(source, to))
        # Numbers of gradients are negative, so that both have their own.
        key = (source, number if to > source else ~number)
        if work is not None:
            self._sent.setdefault(key, []).append((work, tensor))

    def _receive(self, tensor: Tensor, source: int, to: int) -> None:
        rank = self._processes.rank_at(self._processes.position_of(source))
        dist.recv(tensor, rank, self._group(source, to), tag=_tag(source, to))

    def _group(self, source: int, to: int) -> dist.ProcessGroup:
        wraps = self._processes.position_of(min(source, to)) == self._processes.count - 1
        return self._processes.links[source > to, wraps]

    def _finish(self, stage: int, number: int) -> None:
        for work, _ in self._sent.pop((stage, number), ()):
            work.wait()

    def finish(self) -> None:
        """Wait until all messages have been sent."""
        for key in list(self._sent):
            self._finish(*key)

    def close(self) -> None:
        """Drop messages that nothing has received."""
        self._sent.clear()


def _tag(source: int, to: int) -> int:
    return 2 * max(source, to) + (source > to)


class _Same(torch.autograd.Function):
    """Returns its input as a tensor that may be changed in place, unlike a leaf or its views."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0]


def changeable(tensor: Tensor) -> Tensor:
    """The same tensor for a child that changes it in place, such as ``nn.ReLU(inplace=True)``."""
    if not tensor.requires_grad:
        return tensor
    same: Tensor = _Same.apply(tensor)  # type: ignore[no-untyped-call]
    return same
