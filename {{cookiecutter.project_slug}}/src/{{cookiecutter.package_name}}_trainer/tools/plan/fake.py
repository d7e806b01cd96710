"""Fake tensors, which have shapes and need no memory, and a process group that sends nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from ...launch import hangs, rendezvous
from ...strategies.fsdp.fsdp import FSDP
from ...strategies.gradients.averaging import GradientAverage
from ...strategies.gradients.same_use import SameUse

_ATEN: Any = torch.ops.aten


def _item(x: Tensor) -> Any:
    return False if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1


def _masked(x: Tensor, indices: Any) -> Any:
    for k, mask in enumerate(indices):
        if mask is not None and mask.dtype in (torch.bool, torch.uint8):
            return x.new_empty((*x.shape[:k], mask.numel(), *x.shape[k + mask.dim() :]))
    return None


ANSWERS: dict[Any, Any] = {
    _ATEN._local_scalar_dense.default: _item,
    _ATEN.equal.default: lambda *_: True,
    _ATEN.nonzero.default: lambda x: x.new_empty((x.numel(), x.dim()), dtype=torch.int64),
    _ATEN.masked_select.default: lambda x, mask: x.new_empty((x + mask).numel()),
    _ATEN.index.Tensor: _masked,
}
"""Bounds for what depends on data: ``item()`` is 1, ``if tensor:`` is false, a mask keeps all."""


def _deepcopy(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    # torch's own sets a storage, which corrupts memory if it is fake.
    copy = tensor.detach().clone()
    copy = nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy
    memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return copy


def _apply(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    # torch's own swaps fake parameters, which may not have references.
    for child in module.children() if recurse else ():
        child._apply(change)
    for parameter in module.parameters(recurse=False):
        parameter.data = change(parameter.data)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module


@contextlib.contextmanager
def tensors() -> Iterator[None]:
    """Tensors that are created in it are fake."""
    with (
        mock.patch.object(Tensor, "__deepcopy__", _deepcopy),
        mock.patch.object(nn.Parameter, "__deepcopy__", _deepcopy),
        mock.patch.object(nn.Module, "_apply", _apply),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


@contextlib.contextmanager
def group(strategy: FSDP, on_gpus: bool) -> Iterator[None]:
    """Process groups that are initialized in it have no peers, and send nothing.

    The strategy, which sees fake CPU tensors, does what it would do on the plan's devices.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = unset_fake_temporarily()(strategy.make_mesh)
    own: dict[str, Any] = {"whole_blocks": on_gpus, "_skips": lambda _: False, "make_mesh": mesh}
    with (
        mock.patch.dict("os.environ", {"TRAINER_BACKEND": "fake"}),
        mock.patch.object(rendezvous, "connect_store", return_value=FakeStore()),
        mock.patch.object(hangs, "limited", contextlib.nullcontext),
        mock.patch.multiple(strategy, **own),
        # They would ask the peers: by the store, and with copies of some gradients.
        mock.patch.object(SameUse, "note"),
        mock.patch.object(GradientAverage, "average"),
        # A mesh reads the ranks that it is made of.
        mock.patch.object(DeviceMesh, "__init__", unset_fake_temporarily()(DeviceMesh.__init__)),
    ):
        yield
