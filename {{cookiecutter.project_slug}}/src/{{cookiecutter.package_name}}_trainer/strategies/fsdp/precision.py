"""The data type in which ``fsdp`` gathers each parameter with autocast.

Autocast casts the weights of linear layers, convolutions and attention in each forward, and the
autograd graph keeps the full copies for backward on every rank. That would undo the savings of
sharding. If these weights are gathered in half precision, autocast need not cast them, the graph
keeps only what the unit frees, and communication is halved. All other parameters (norms,
embeddings) are gathered unchanged: each operation computes in the data type that autocast selects.

Source: https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from ...errors import UserError
from ..precision import Precision
from ..recast import recasting

# Layers that autocast computes in half precision. Recurrent layers are not included, because they
# also keep their weights in a list.
_CAST = (nn.Linear, _ConvNd, nn.MultiheadAttention)
# Attention biases: concatenated with activations, for which autocast uses the widest type.
_NOT_CAST = ("bias_k", "bias_v")


def is_cast(module: nn.Module, name: str) -> bool:
    """Whether autocast casts a module's own parameter in each forward."""
    return isinstance(module, _CAST) and name not in _NOT_CAST


class _Parameter(FSDPParam):
    """torch's record of a parameter; gathered in half precision if autocast would cast it.

    Gradients of a unit then differ in data type, and are converted to one before reduction.
    """

    half: torch.dtype

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        info = self._module_info
        owners = [(info.module, info.param_name)]
        owners += zip(info.shared_modules, info.shared_param_names, strict=True)
        if all(is_cast(*each) for each in owners):
            mp_policy = dataclasses.replace(mp_policy, param_dtype=self.half)
        super().init_dtype_attrs(mp_policy)
        # torch omits it if gradients already have this type; it must be the same in a whole unit.
        self.reduce_dtype = mp_policy.reduce_dtype

    def accumulate_unsharded_grad_if_needed(self) -> None:
        super().accumulate_unsharded_grad_if_needed()
        if hasattr(self, "_unsharded_param"):  # the unit was gathered
            self.to_accumulated_grad_if_needed()


def gather_as_autocast(records: Iterable[Any], half: torch.dtype) -> None:
    """Gather the parameters that autocast casts in half precision.

    Args:
        records: torch's records of a unit's parameters, all in float32.
        half: The data type of autocast.
    """
    for each in records:
        each.__class__ = _Parameter
        each.half = half


def _has_own_matrices(module: nn.Module) -> bool:
    """Whether a module is not of a torch class, and has parameters that it may multiply by."""
    kind = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
    own = (each for each in module.parameters(recurse=False) if each.dim() > 1)
    return not kind.__module__.startswith("torch.") and next(own, None) is not None


class AutocastCalls:
    """Ensures that modules with weights in half precision run in autocast, or raises an error.

    Args:
        precision: Precision of the run.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = precision
        self._handles: list[RemovableHandle] = []
        self._entered: list[AbstractContextManager[None]] = []
        self._in_step = False

    @property
    def _is_on(self) -> bool:
        return torch.is_autocast_enabled(self._precision.device_type)

    def watch(self, module: nn.Module, units: Iterable[nn.Module]) -> None:
        """Add hooks that check calls until :meth:`close`.

        Args:
            module: The user's module.
            units: Units in it, which a user's hook may call outside of a step.
        """
        self._module = module
        self._has_own = any(_has_own_matrices(each) for each in module.modules())
        enter, leave = map(torch.compiler.disable, (self._enter, self._leave))
        for unit in units:
            self._handles += [
                unit.register_forward_pre_hook(enter),
                unit.register_forward_hook(leave, always_call=True),
            ]
        for name, each in module.named_modules():
            if any(is_cast(each, own) for own, _ in each.named_parameters(recurse=False)):
                self._handles.append(each.register_forward_pre_hook(self._checking(name)))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step, in which the user may have disabled autocast on purpose."""
        self._in_step = True
        try:
            with self._own_weights():
                yield
        finally:
            self._in_step = False

    def _own_weights(self) -> AbstractContextManager[Any]:
        return recasting(self._precision, self._module) if self._has_own else nullcontext()

    def _enter(self, *_: Any) -> None:
        outside = not self._in_step and not self._is_on
        self._entered.append(self._precision.autocast() if outside else nullcontext())
        self._entered[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        if self._entered:  # the call may have failed before
            self._entered.pop().__exit__(None, None, None)

    def _checking(self, name: str) -> Any:
        def check(*_: Any) -> None:
            if not self._is_on:
                raise UserError(
                    f"{name} is called without autocast, and precision={self._precision.name!r} "
                    "gathers its weights in half precision; call it under autocast, or set "
                    "--trainer.strategy_options.parameter_dtype float32"
                )

        return check

    def close(self) -> None:
        """Remove the hooks."""
        for each in self._handles:
            each.remove()
        self._handles.clear()
