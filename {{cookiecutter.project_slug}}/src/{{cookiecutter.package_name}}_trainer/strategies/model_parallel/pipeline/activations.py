"""Activations between stages: packed into one flat tensor, and its description.

torch's stages exchange contiguous tensors of known shapes, each with a gradient. A packed tensor is
all of this, whatever a stage gives: transposed tensors, integers, or a tuple of several types.
"""

import functools
import math
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
        """The data type."""
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
        """Describe the output of a stage, whose last child is at ``where``.

        Raises:
            UserError: It contains anything but tensors.
        """
        specs = []
        for each in output if isinstance(output, tuple) else (output,):
            if not isinstance(each, Tensor):
                raise UserError(
                    f"{where} gives a {type(each).__name__} to the next stage; give a tensor or a "
                    "tuple of tensors there, or divide sequential_module elsewhere (balance)"
                )
            specs.append(TensorSpec(tuple(each.shape), str(each.dtype)[6:], each.requires_grad))
        return cls(tuple(specs), isinstance(output, tuple))

    @classmethod
    def from_json(cls, value: Any) -> "Spec":
        """Read a description that was sent as JSON."""
        specs = (TensorSpec(tuple(shape), *rest) for shape, *rest in value[0])
        return cls(tuple(specs), value[1])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the packed tensor, which holds all values exactly."""
        own = [each.dtype for each in self.tensors if each.requires_grad]
        return functools.reduce(torch.promote_types, own) if own else torch.float32

    def empty(self, device: torch.device | str) -> Tensor:
        """A packed tensor without values."""
        length = sum(each.length(self.dtype) for each in self.tensors)
        return torch.empty(length, dtype=self.dtype, device=device)


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        context.others = [each.new_zeros(()).expand(each.shape) for each in others]
        return tensor.detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], *context.others


def alias(tensor: Tensor, *others: Tensor) -> Tensor:
    """The same tensor, which a child may change in place; the others get zeros as gradients."""
    found: Tensor = _Alias.apply(tensor, *others)  # type: ignore[no-untyped-call]
    return found


def pack(output: Any, spec: Spec, device: torch.device) -> Tensor:
    """Pack the output of a stage, as described."""
    parts = []
    for each in output if isinstance(output, tuple) else (output,):
        if each.requires_grad:
            part = each.to(spec.dtype).flatten()
        else:
            part = each.contiguous().flatten().view(torch.uint8)
            padding = part.new_zeros(-len(part) % spec.dtype.itemsize)
            part = torch.cat([part, padding]).view(spec.dtype)
        parts.append(part.to(device))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def unpack(flat: Tensor, spec: Spec) -> Any:
    """The output of a stage, from a packed tensor."""
    values = alias(flat)
    found, start = [], 0
    for each in spec.tensors:
        length = each.length(spec.dtype)
        if each.requires_grad:
            part = values.narrow(0, start, length)
            part = (part if each.dtype.is_complex else part.real).to(each.dtype)
        else:
            # A copy: its first byte must be where an element of any type may begin.
            part = flat.detach()[start : start + length].clone().view(torch.uint8)
            part = part[: math.prod(each.shape) * each.dtype.itemsize].view(each.dtype)
        found.append(part.view(each.shape))
        start += length
    return tuple(found) if spec.is_tuple else found[0]
