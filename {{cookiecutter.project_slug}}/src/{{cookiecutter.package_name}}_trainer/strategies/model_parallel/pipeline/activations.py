"""Activations between stages: packed into one flat tensor, and its description.

torch's stages exchange contiguous tensors of known shapes, each with a gradient. A packed tensor is
all of this, whatever a stage gives: transposed tensors, integers, or a tuple of several types. It
ends with a mark for each tensor, whose gradient is 1 if the stages after it use the tensor.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ....errors import UserError


class TensorSpec(NamedTuple):
    """Shape and type of a tensor; if it does not require a gradient, its bytes are sent."""

    shape: tuple[int, ...]
    type: str
    requires_grad: bool

    @property
    def dtype(self) -> torch.dtype:
        return cast("torch.dtype", getattr(torch, self.type))

    def length(self, dtype: torch.dtype) -> int:
        """Number of elements of a packed tensor that it takes."""
        count = math.prod(self.shape)
        return count if self.requires_grad else -(-count * self.dtype.itemsize // dtype.itemsize)


class Spec(NamedTuple):
    """What a stage gives to the next one: a tensor, or a tuple of them."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool

    @classmethod
    def of(cls, output: Any, where: str) -> "Spec":
        """Describe the output of a stage, whose last child is at ``where``."""
        specs = []
        for value in output if isinstance(output, tuple) else (output,):
            if not isinstance(value, Tensor):
                problem = f"{where} gives a {type(value).__name__} to the next stage"
                other = "divide sequential_module elsewhere (balance)"
                raise UserError(f"{problem}; give a tensor or a tuple of tensors there, or {other}")
            specs.append(TensorSpec(tuple(value.shape), str(value.dtype)[6:], value.requires_grad))
        return cls(tuple(specs), isinstance(output, tuple))

    @classmethod
    def from_json(cls, value: Any) -> "Spec":
        return cls(tuple(TensorSpec(tuple(shape), *rest) for shape, *rest in value[0]), value[1])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the packed tensor, which holds all values exactly."""
        dtypes = [tensor.dtype for tensor in self.tensors if tensor.requires_grad]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    def empty(self, device: torch.device | str) -> Tensor:
        """A packed tensor without values."""
        length = sum(tensor.length(self.dtype) for tensor in self.tensors)
        return torch.empty(length + len(self.tensors), dtype=self.dtype, device=device)


class Uses:
    """Which tensors the stages after this one use.

    Reading their marks waits for a GPU: it is done in the first backward, and in all that follow
    only if that one has found a tensor that is not used.
    """

    _is_read = True

    def read(self, marks: Tensor, of: Sequence[bool]) -> list[bool]:
        """Whether each tensor is used; ``of``: which of them require a gradient."""
        if not self._is_read:
            return list(of)
        used = [bool(mark) for mark in marks.tolist()]
        self._is_read = used != list(of)
        return used


class _Joined(torch.autograd.Function):
    """Parts as one tensor that ends with their marks; a part without use has no gradient."""

    @staticmethod
    def forward(context: Any, uses: Uses, *parts: Tensor) -> Tensor:
        context.uses, context.lengths = uses, [*map(len, parts), len(parts)]
        return torch.cat([*parts, parts[0].new_zeros(len(parts))])

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        *parts, marks = gradients[0].split(context.lengths)
        used = context.uses.read(marks, context.needs_input_grad[1:])
        return None, *(grad if is_used else None for grad, is_used in zip(parts, used, strict=True))


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gradient: float, tensor: Tensor, *others: Tensor) -> Tensor:
        context.set_materialize_grads(False)
        context.others = [other.new_full((), gradient).expand(other.shape) for other in others]
        return tensor.detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        if gradients[0] is None:
            return None, None, *(None for _ in context.others)
        # Contiguous: torch's stages may send them as they are.
        return None, gradients[0], *(other.contiguous() for other in context.others)


def alias(tensor: Tensor, *others: Tensor, gradient: float = 0.0) -> Tensor:
    """The same tensor, which a child may change in place; the others get a gradient with it."""
    result: Tensor = _Alias.apply(gradient, tensor, *others)  # type: ignore[no-untyped-call]
    return result


def pack(output: Any, spec: Spec, device: torch.device, uses: Uses) -> Tensor:
    pieces = []
    for tensor in output if isinstance(output, tuple) else (output,):
        if tensor.requires_grad:
            piece = tensor.to(spec.dtype).flatten()
        else:
            piece = tensor.contiguous().flatten().view(torch.uint8)
            padding = piece.new_zeros(-len(piece) % spec.dtype.itemsize)
            piece = torch.cat([piece, padding]).view(spec.dtype)
        pieces.append(piece.to(device))
    packed: Tensor = _Joined.apply(uses, *pieces)  # type: ignore[no-untyped-call]
    return packed


def unpack(flat: Tensor, spec: Spec) -> Any:
    """The output of a stage, from a packed tensor."""
    tensors, start, marks = [], 0, len(flat) - len(spec.tensors)
    for number, tensor in enumerate(spec.tensors):
        length = tensor.length(spec.dtype)
        if tensor.requires_grad:
            mark = flat.narrow(0, marks + number, 1)
            piece = alias(flat.narrow(0, start, length), mark, gradient=1.0)
            piece = (piece if tensor.dtype.is_complex else piece.real).to(tensor.dtype)
        else:
            # A copy: its first byte must be where an element of any type may begin.
            piece = flat.detach()[start : start + length].clone().view(torch.uint8)
            piece = piece[: math.prod(tensor.shape) * tensor.dtype.itemsize].view(tensor.dtype)
        tensors.append(piece.view(tensor.shape))
        start += length
    return tuple(tensors) if spec.is_tuple else tensors[0]
