"""In which number format ``fsdp`` gathers each parameter under autocast.

Autocast casts the weights of linear layers, convolutions and attention in each forward, and the
graph keeps the copies for the backward: whole, on every rank. That would undo what sharding saves.
Where they are gathered in half precision already, autocast has nothing to cast, what is kept is
what the unit frees, and half as many bytes travel. All other parameters (norms, embeddings) are
gathered as they are: so each operation computes in the format that autocast gives it.

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

# Whose operations autocast computes in half precision. Recurrent layers are not among them: they
# keep their weights in a list besides.
_CAST = (nn.Linear, _ConvNd, nn.MultiheadAttention)
# Of attention: concatenated with what has been computed, which autocast leaves to the widest.
_NOT_CAST = ("bias_k", "bias_v")


def is_cast(module: nn.Module, name: str) -> bool:
    """Whether autocast casts a module's own parameter in each forward."""
    return isinstance(module, _CAST) and name not in _NOT_CAST


class _Parameter(FSDPParam):
    """torch's record of a parameter; gathered in half precision where autocast would cast it.

    Gradients of a unit then differ in format, and are brought into one before they are reduced.
    """

    half: torch.dtype

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        info = self._module_info
        owners = [(info.module, info.param_name)]
        owners += zip(info.shared_modules, info.shared_param_names, strict=True)
        if all(is_cast(*each) for each in owners):
            mp_policy = dataclasses.replace(mp_policy, param_dtype=self.half)
        super().init_dtype_attrs(mp_policy)
        # torch leaves it out where gradients come in this format; it is the same in all of a unit.
        self.reduce_dtype = mp_policy.reduce_dtype

    def accumulate_unsharded_grad_if_needed(self) -> None:
        super().accumulate_unsharded_grad_if_needed()
        if hasattr(self, "_unsharded_param"):  # it was gathered
            self.to_accumulated_grad_if_needed()


def gather_as_autocast(records: Iterable[Any], half: torch.dtype) -> None:
    """Have what autocast casts be gathered in half precision.

    Args:
        records: torch's, of a unit's parameters, all of them in float32.
        half: what autocast computes in.
    """
    for each in records:
        each.__class__ = _Parameter
        each.half = half


def _has_own_matrices(module: nn.Module) -> bool:
    """Whether it is of no class of torch's and has parameters that it may multiply by."""
    kind = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
    own = (each for each in module.parameters(recurse=False) if each.dim() > 1)
    return not kind.__module__.startswith("torch.") and next(own, None) is not None


class AutocastCalls:
    """What computes with weights in half precision does so under autocast, or says that it cannot.

    Args:
        precision: of the run.
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
        """Watch calls until :meth:`close`.

        Args:
            module: the user's.
            units: in it, which a hook of the user's may call outside a step.
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
        """What is called within is a step, whose autocast the user may have ended on purpose."""
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
        if self._entered:  # it may have failed before it entered
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
        """Take the hooks away."""
        for each in self._handles:
            each.remove()
        self._handles.clear()
