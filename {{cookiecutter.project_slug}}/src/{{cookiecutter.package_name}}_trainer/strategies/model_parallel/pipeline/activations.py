"""Activations between stages: packed into one flat tensor, and its description.

torch's stages exchange contiguous tensors of known shapes, each with a gradient. A packed tensor is
all of this, whatever a stage gives: transposed tensors, integers, or a tuple of several types.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....checkpoint import dtensors
from ....errors import UserError


class TensorSpec(NamedTuple):
    """Shape and type of a tensor; if it does not require a gradient, its bytes are sent."""

    shape: tuple[int, ...]
    type: str
    requires_grad: bool

    @property
    def dtype(self) -> torch.dtype:
        """The data type."""
        found: torch.dtype = getattr(torch, self.type)
        return found

    def length(self, dtype: torch.dtype) -> int:
        """Number of elements of a packed tensor that it takes."""
        count = math.prod(self.shape)
        if self.requires_grad:
            return count * (1 + self.dtype.is_complex)
        return -(-count * self.dtype.itemsize // dtype.itemsize)


class Spec(NamedTuple):
    """What a stage gives to the next one: a tensor, or a tuple of them."""

    tensors: tuple[TensorSpec, ...]
    is_tuple: bool

    @classmethod
    def of(cls, output: Any) -> "Spec":
        """Describe the output of a stage."""
        tensors = output if isinstance(output, tuple) else (output,)
        specs = (
            TensorSpec(tuple(each.shape), str(each.dtype)[6:], each.requires_grad)
            for each in tensors
        )
        return cls(tuple(specs), isinstance(output, tuple))

    @classmethod
    def from_json(cls, value: Any) -> "Spec":
        """Read a description that was sent as JSON."""
        specs = (TensorSpec(tuple(shape), *rest) for shape, *rest in value[0])
        return cls(tuple(specs), value[1])

    @property
    def dtype(self) -> torch.dtype:
        """Type of the packed tensor, which holds all values exactly."""
        own = [each.dtype.to_real() for each in self.tensors if each.requires_grad]
        return functools.reduce(torch.promote_types, own) if own else torch.float32

    def lengths(self) -> list[int]:
        """Number of elements of the packed tensor that each tensor takes."""
        return [each.length(self.dtype) for each in self.tensors]

    def empty(self, device: torch.device | str) -> Tensor:
        """A packed tensor without values."""
        return torch.empty(sum(self.lengths()), dtype=self.dtype, device=device)


class _Alias(torch.autograd.Function):
    """The first tensor, which may be changed in place; the others get zeros as gradients."""

    @staticmethod
    def forward(context: Any, flat: Tensor, *others: Tensor) -> Tensor:
        context.others = [(each.shape, each.dtype, each.device) for each in others]
        return flat.detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], *(
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in context.others
        )


def linked(tensor: Tensor, source: Tensor) -> Tensor:
    """The same tensor with a gradient, and one for its source, used or not, as torch requires."""
    alias: Tensor = _Alias.apply(tensor, source)  # type: ignore[no-untyped-call]
    return alias


def changeable(tensor: Tensor) -> Tensor:
    """The same tensor for a child that changes it in place, such as ``nn.ReLU(inplace=True)``."""
    if not tensor.requires_grad:
        return tensor
    alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias


def check(output: object, where: str) -> None:
    """Check that a child may give its output to another stage.

    Raises:
        UserError: It contains anything but tensors, or DTensors.
    """
    for each in output if isinstance(output, tuple) else (output,):
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


def pack(output: Any, spec: Spec, device: torch.device) -> Tensor:
    """Pack the output of a stage, as described."""
    tensors = output if isinstance(output, tuple) else (output,)
    parts = [
        _values(each, spec.dtype) if each.requires_grad else _bytes(each, spec.dtype)
        for each in tensors
    ]
    return torch.cat([each.to(device) for each in parts]) if len(parts) > 1 else parts[0].to(device)


def _values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Not view_as_real, whose gradient would have to begin at an even place.
    real = torch.stack([tensor.real, tensor.imag], -1) if tensor.is_complex() else tensor
    return real.to(dtype).flatten()


def _bytes(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    own = tensor.contiguous().flatten().view(torch.uint8)
    return torch.cat([own, own.new_zeros(-len(own) % dtype.itemsize)]).view(dtype)


def unpack(flat: Tensor, spec: Spec) -> Any:
    """The output of a stage, from a packed tensor."""
    values = changeable(flat)
    found, start = [], 0
    for each, length in zip(spec.tensors, spec.lengths(), strict=True):
        if each.requires_grad:
            part = values.narrow(0, start, length).to(each.dtype.to_real())
            if each.dtype.is_complex:
                part = torch.complex(*part.view(-1, 2).unbind(1))
            found.append(part.view(each.shape))
        else:
            # A copy: its first byte must be where an element of any type may begin.
            own = flat.detach()[start : start + length].clone().view(torch.uint8)
            used = math.prod(each.shape) * each.dtype.itemsize
            found.append(own[:used].view(each.dtype).view(each.shape))
        start += length
    return tuple(found) if spec.is_tuple else found[0]
