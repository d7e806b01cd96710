"""Cast weights again in backward, instead of keeping the copies that autocast makes.

With autocast, a matrix product saves its weight in half precision for backward: a copy of the full
weight, on every rank, which outlives the unit that gathered it. Here, a recipe is saved instead,
and the copy is made again from the weight, which the engine also gathers for backward. The result
is bit-identical.

Source: https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-tutorial
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .precision import Precision

_NAMES = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm")
# Operations with weights that autocast computes in half precision.
_CAST = {
    torch._C._nn.linear,
    *(getattr(torch, f"conv{dims}d") for dims in (1, 2, 3)),
    *(getattr(torch, f"conv_transpose{dims}d") for dims in (1, 2, 3)),
    *(getattr(where, name) for where in (torch, Tensor) for name in _NAMES if hasattr(where, name)),
    torch.einsum,
    functional.multi_head_attention_forward,
}
# Attention biases: concatenated with activations, for which autocast uses the widest type.
_NOT_CAST = {functional.multi_head_attention_forward: (7, 8)}
_MODIFIED = "a tensor that the backward needs has been changed in place since the forward"


class _Recipe(NamedTuple):
    """How to recreate a tensor that shares memory with the cast copy of a weight."""

    weight: Tensor
    of_weight: tuple[torch.Size, tuple[int, ...], int]
    of_copy: tuple[torch.Size, tuple[int, ...], int]
    dtype: torch.dtype


class _Kept(NamedTuple):
    """Any other tensor, and its version, which autograd does not check with saved-tensor hooks."""

    tensor: Tensor
    version: int


class Recast(TorchFunctionMode):
    """In this context, autocast's copies of parameters are not saved for backward.

    Args:
        dtype: Data type of autocast.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # In compiled code, the compiler chooses what to save.
        if func not in _CAST or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        left = _NOT_CAST.get(func, ())
        args = tuple(each if i in left else self._cast(each) for i, each in enumerate(args))
        kwargs = {name: self._cast(each) for name, each in kwargs.items()}
        if not self._copies:
            return func(*args, **kwargs)
        try:
            with saved_tensors_hooks(self._pack, _unpack):
                return func(*args, **kwargs)
        finally:
            self._copies.clear()

    def _cast(self, value: Any) -> Any:
        """Cast a weight, or a view of one, like autocast; return other values unchanged."""
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        whole = value._base if value._is_view() else value
        if not isinstance(whole, nn.Parameter) or not torch.is_autocast_enabled(value.device.type):
            return value
        copy = value.to(self._dtype)
        self._copies[copy.untyped_storage()._cdata] = value, copy
        return copy

    def _pack(self, tensor: Tensor) -> _Recipe | _Kept:
        found = self._copies.get(tensor.untyped_storage()._cdata)
        if found is None:
            return _Kept(tensor, tensor._version)
        value, _ = found
        whole = value._base if value._base is not None else value
        return _Recipe(whole, _layout(value), _layout(tensor), self._dtype)


def _unpack(packed: _Recipe | _Kept) -> Tensor:
    if isinstance(packed, _Kept):
        if packed.tensor._version != packed.version:
            raise RuntimeError(_MODIFIED)
        return packed.tensor
    with torch.no_grad():
        copy = packed.weight.as_strided(*packed.of_weight).to(packed.dtype)
        return copy.as_strided(*packed.of_copy)


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def recasting(precision: Precision, module: nn.Module) -> AbstractContextManager[Any]:
    """Context of a training step, if full weights must not be kept for backward.

    Args:
        precision: Precision of the run; without autocast nothing is cast.
        module: The user's module; nothing to do if it is compiled as a whole.
    """
    if precision.dtype is None or module._compiled_call_impl is not None:
        return nullcontext()
    return Recast(precision.dtype)
