"""Refuse what user code does with weights and gradients that its process does not hold whole.

Without this, it would read and change something else, or nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..checkpoint import dtensors
from ..errors import UserError

_ABOUT = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad")
_ALLOWED = {  # what may be asked of any parameter; an engine that gathers it sets its data
    *(getattr(Tensor, name).__get__ for name in _ABOUT),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "data")),
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
    Tensor.requires_grad_,
}
_FREED = "which would be lost: what is gathered is freed"
_AGAIN = "create the module again, and load them: load_weights(module, trainer.run_directory)"


def refuse_sharded(module: nn.Module) -> None:
    """Raise UserError if a fit has left parameters of a module sharded, or without memory."""
    for p in module.parameters():
        is_freed = p.numel() > 1 and p.layout == torch.strided and not any(p.stride())
        if dtensors.is_sharded(p) or is_freed:
            problem = f"{type(module).__name__} is still sharded from a previous fit"
            example = "test(module, checkpoint=trainer.run_directory)"
            raise UserError(f"{problem}; create it again, and give a checkpoint, as in {example}")


def forbid_calls(module: nn.Module, *, only_empty: bool = False) -> None:
    """Let calls of layers raise UserError on all ranks after a fit, which left parts of weights.

    ``only_empty``: only where parameters are freed, and any use of these, until they are loaded.
    """
    for layer in module.modules():
        if any(not (only_empty and tensor.numel()) for tensor in layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(partial(_refuse_call, only_empty))
    for parameter in module.parameters():
        if only_empty and type(parameter) is nn.Parameter and not parameter.numel():
            parameter.__class__ = Freed


def _refuse_call(only_empty: bool, layer: nn.Module, _: Any) -> None:
    if not only_empty or not all(tensor.numel() for tensor in layer.parameters(recurse=False)):
        what = f"a {type(layer).__name__} is called after the fit that has sharded its weights"
        raise UserError(f"{what}; {_AGAIN}")


class WeightGuard:
    """Contexts of steps: the first of training raises UserError if it changes weights.

    ``reason``: why other weights would be trained. ``whole``: ids of those that may change.
    """

    def __init__(self, reason: str = _FREED, whole: Iterable[int] = ()) -> None:
        self._reason, self._whole, self._is_first = reason, {*whole}, True
        self._totals: dict[nn.Module, dict[str, str]] = {}

    def _error(self, what: str) -> UserError:
        advice = "change weights in on_train_batch_start, or use strategy='ddp'"
        return UserError(f"{what}, {self._reason}; {advice}")

    @contextmanager
    def step(self, module: nn.Module, stage: str) -> Iterator[None]:
        """Context of a step on copies of all parameters of a module."""
        if not self._begins(stage):
            yield
            return
        self._begin(module, recurse=True)
        try:
            yield
        except RuntimeError as error:
            if "a view and its base" not in str(error):
                raise
            raise self._error("training_step changes a parameter in place") from error
        self._end(module, recurse=True)

    @contextmanager
    def layers(self, step: nn.Module, stage: str, by_hand: bool = False) -> Iterator[None]:
        """Context of the call of a step, in which layers gather their parameters.

        ``by_hand``: the step may step optimizers, and is not watched itself.
        """
        if not self._begins(stage):
            yield
            return
        layers = [layer for layer in step.modules() if layer._parameters and layer is not step]
        with ExitStack() as hooks:
            for layer in layers if by_hand else [step, *layers]:
                begin = partial(self._begin, recurse=layer is step)
                end = partial(self._end, recurse=layer is step)
                hooks.enter_context(layer.register_forward_pre_hook(begin))
                hooks.enter_context(layer.register_forward_hook(end, prepend=True))
            yield

    def _begins(self, stage: str) -> bool:
        begins = self._is_first and stage == "training"
        self._is_first &= not begins
        return begins

    def _begin(self, layer: nn.Module, *_: Any, recurse: bool) -> None:
        if not torch.compiler.is_compiling():
            self._totals[layer] = self._total(layer, recurse)

    def _end(self, layer: nn.Module, *_: Any, recurse: bool) -> None:
        if torch.compiler.is_compiling():
            return
        of_class = f"{type(layer).__name__.removeprefix('FSDP')}.forward"
        before = self._totals.pop(layer, {})
        for name, total in self._total(layer, recurse).items():
            if before.get(name, total) != total:
                where = "training_step" if recurse else of_class
                raise self._error(f"{where} changes {name.removeprefix('module.')}")

    def _total(self, layer: nn.Module, recurse: bool) -> dict[str, str]:
        """The sum of each parameter, as text: NaN is equal to NaN."""
        named = layer.named_parameters(recurse=recurse)
        plain = [(name, p) for name, p in named if type(p) in (Tensor, nn.Parameter, _Missing)]
        known = [(name, p) for name, p in plain if p.numel() and id(p) not in self._whole]
        floats = [(name, p) for name, p in known if p.is_floating_point() and p.dtype.itemsize > 1]
        return {name: str(p.detach().sum(dtype=torch.float64).item()) for name, p in floats}


class HookGuard:
    """Contexts of user code, in which an operation raises UserError if its result would be wrong.

    ``is_held``: whether this process has the values of a parameter or buffer now. ``gradients`` are
    ``"whole"``; ``"hidden"``, if they are not in the parameters; or ``"some"``, if other processes
    have those of other parameters: then they may be changed, but not be reduced to a number.
    """

    def __init__(
        self,
        module: nn.Module,
        instead: str,
        is_held: Callable[[Any], bool] = lambda _: True,
        gradients: Literal["whole", "hidden", "some"] = "whole",
    ) -> None:
        self._module, self._instead, self.is_held = module, instead, is_held
        self._stand_in: Any = {"hidden": _Hidden, "some": _Some}.get(gradients)
        self._hook = "code after the fit"

    def error(self, what: str) -> UserError:
        problem = f"{self._hook} uses {what} that are not whole in this process"
        return UserError(f"{problem}; {self._instead}")

    @contextmanager
    def __call__(self, hook: str) -> Iterator[None]:
        parameters: list[Any] = list(self._module.parameters())
        replaced = self._replaced(parameters) if hook == "on_before_optimizer_step" else []
        try:
            with self.assigned(), self.weights(hook):
                yield
            for p, _, stand_in in replaced:
                if p.grad is not stand_in and self._stand_in is _Hidden:
                    raise self.error("gradients")
        except (AttributeError, TypeError, RuntimeError) as error:
            of_gradient = "NoneType" in str(error) or "assign a gradient" in str(error)
            if hook == "on_before_optimizer_step" and of_gradient:  # another process has it
                raise UserError(f"{self.error('gradients')} ({error})") from error
            if "torch.Size([0])" in str(error):
                raise self.error("weights") from error
            raise
        finally:
            for p, gradient, stand_in in replaced:
                if p.grad is not None:  # the user may have removed it
                    p.grad = gradient if p.grad is stand_in else p.grad.as_subclass(Tensor)

    @contextmanager
    def assigned(self) -> Iterator[None]:
        """Context of ``p.data = …``, which writes it where the engine has the parameter."""
        memory = [(p, p.data) for p in self._module.parameters() if self.is_held(p)]
        yield
        for p, data in memory:
            if p.data_ptr() != data.data_ptr() and p.shape == data.shape:
                data.copy_(p.data)
                p.data = data

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """Context of user code of this name, which may use the weights that are held then."""
        self._hook, _Guarded.guard = name, self
        tensors: Any = (*self._module.parameters(), *self._module.buffers())
        missing = [(tensor, type(tensor)) for tensor in tensors if not self.is_held(tensor)]
        for tensor, _ in missing:
            tensor.__class__ = _Missing
        try:
            yield
        finally:
            for tensor, kind in missing:
                tensor.__class__ = kind

    def _replaced(self, parameters: list[Any]) -> list[tuple[Any, Any, Any]]:
        """Replace gradients by stand-ins; the parameters with both."""
        replaced: list[tuple[Any, Any, Any]] = []
        for p in parameters if self._stand_in is not None else ():
            gradient = p.grad
            if self._stand_in is _Hidden and p.requires_grad:
                stand_in = torch.empty((), dtype=p.dtype, device=p.device).expand(p.shape)
            elif gradient is not None:
                stand_in = gradient
            else:
                continue
            p.grad = stand_in = stand_in.as_subclass(self._stand_in)
            replaced.append((p, gradient, stand_in))
        return replaced


class _Guarded:
    guard: ClassVar[HookGuard]


class _Missing(_Guarded, nn.Parameter):
    """A parameter or buffer whose values are not in this process."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ALLOWED:
            missing = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Missing))
            if not all(map(cls.guard.is_held, missing)):
                raise cls.guard.error("weights")
        call: Any = super().__torch_function__  # a parameter's calls the function plainly
        return call(func, types, args, kwargs or {})


class _Hidden(_Guarded, Tensor):
    """Stands for a gradient that is not in the parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise cls.guard.error("gradients")


class _Some(_Guarded, Tensor):
    """A gradient, beside those of other processes: a norm of these would not be that of all."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call: Any = super().__torch_function__
        result = call(func, types, args, kwargs or {})
        for leaf in tree_leaves(result):
            is_number = leaf.ndim == 0 if isinstance(leaf, Tensor) else isinstance(leaf, float)
            if is_number and all(leaf is not argument for argument in tree_leaves(args)):
                raise cls.guard.error("gradients")
        return result


class Freed(_Missing):
    """A parameter that a fit has freed, until it is loaded."""

    guard = HookGuard(nn.Module(), _AGAIN, lambda tensor: tensor.numel() > 0)
