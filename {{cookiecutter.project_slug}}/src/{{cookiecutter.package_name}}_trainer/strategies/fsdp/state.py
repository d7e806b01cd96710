"""Place what is not sharded, compute in half precision, and step DTensors of several meshes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...checkpoint import dtensors
from ...data import moving
from ...errors import UserError, refuse
from ...module import TrainingModule
from ..base import Stage, StepModule
from ..gradients import user_hooks
from ..optimizers import replace_kept
from .units import can_shard, outer_modules

HANDLERS: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
READ = torch.ops.aten._local_scalar_dense.default  # item(), float() and if


class HeldBatchStep(StepModule):
    """On GPUs torch rebuilds containers in inputs of a root, and fails for ``defaultdict``."""

    def forward(self, stage: Stage, batch: Callable[[], Any], batch_idx: int) -> Any:
        """Run ``training_step``, ``validation_step``, … on what a function returns."""
        return super().forward(stage, batch(), batch_idx)

    def run(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        """Run a step on a batch, with the hooks of units."""
        return self(stage, lambda: batch, batch_idx)


def refuse_scripts(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            problem = f"{name} is a ScriptModule, which FSDP cannot shard"
            raise UserError(f"{problem}; use strategy='ddp'")


def hooked(module: nn.Module, before: Mapping[str, int] = MappingProxyType({})) -> list[str]:
    """One line for each parameter with hooks of its gradient, which its shard would not have.

    ``before``: how many are the trainer's.
    """
    return [
        f"{name} has a hook of its gradient (register_hook), which shards do not have: change "
        "gradients in on_before_optimizer_step, or use strategy='ddp'"
        for name, parameter in module.named_parameters()
        if user_hooks.count(parameter) > before.get(name, 0)
    ]


@contextlib.contextmanager
def user_hook(module: nn.Module, hook: str) -> Iterator[None]:
    """Context of a user's hook, which may register no hooks of gradients."""
    may_register = hook in ("configure_optimizers", "on_fit_start", "on_train_epoch_start")
    named = module.named_parameters() if may_register else ()
    before = {name: user_hooks.count(parameter) for name, parameter in named}
    with assignable():
        yield
    if may_register:
        refuse(hooked(module, before))


@contextlib.contextmanager
def assignable() -> Iterator[None]:
    """Context in which ``tensor.data = …`` of a DTensor, which torch ignores, sets it."""

    def assign(tensor: DTensor, values: Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(values)

    if "data" in vars(DTensor):  # within another such context
        yield
        return
    plain: Any = Tensor.data
    DTensor.data = property(plain.__get__, assign)  # type: ignore[assignment]
    try:
        yield
    finally:
        del DTensor.data


def follow(module: TrainingModule, before: Mapping[str, Any]) -> None:
    """Let shards have the attributes of their parameters, and be in lists that modules keep."""
    shards: dict[int, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter is not before[name]:
            vars(parameter).update(vars(before[name]))
            shards[id(before[name])] = parameter
    replace_kept(module, shards)


def read_number(operation: Callable[[Tensor], Any], arguments: tuple[Any, ...], _: Any) -> Any:
    """Refuse to read a number of a DTensor that is not whole, of which torch gives a part."""
    if all(placement.is_replicate() for placement in arguments[0].placements):
        return operation(arguments[0].to_local())
    advice = "call full_tensor() on all ranks, or read the checkpoint after a fit"
    raise UserError(f"item(), float() or if of a sharded tensor: {advice}")


def move_rest(module: nn.Module, device: torch.device) -> None:
    """Move everything in a module except the parameters that are sharded, unit by unit, later."""
    for parameter in module.parameters():
        parameter.grad = None  # it would move without its parameter, and is not sharded with it

    def move(tensor: Tensor) -> Tensor:
        is_sharded_later = isinstance(tensor, nn.Parameter) and can_shard(tensor)
        return tensor if is_sharded_later or tensor.is_meta else tensor.to(device)

    module._apply(move)


@contextlib.contextmanager
def groups_split(optimizer: Optimizer) -> Iterator[None]:
    """Split the parameter groups of an optimizer by mesh in this context, for its step.

    torch's foreach and fused optimizers need all parameters of a group on one mesh. Others, which
    may know parameters by their places or wrap an optimizer, step one parameter after the other.
    """
    groups = optimizer.param_groups
    parts = [
        [{**group, "params": tensors} for tensors in dtensors.by_mesh(group["params"])]
        for group in groups
    ]
    if all(len(pieces) <= 1 for pieces in parts):
        yield
        return
    kept = [{key: group[key] for key in {"foreach", "fused"} & group.keys()} for group in groups]
    if type(optimizer).__module__.startswith("torch.optim"):
        optimizer.param_groups = [new for replacing in parts for new in replacing]
    else:
        for group, options in zip(groups, kept, strict=True):
            group.update(dict.fromkeys(options, False))
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, options in zip(groups, kept, strict=True):
            group.update(options)


def cast_calls(module: nn.Module, half: torch.dtype) -> list[RemovableHandle]:
    """Cast inputs of layers in half precision, and to float32 what a step gets from the model.

    Units gather their float32 parameters in half precision, without autocast. torch's
    ``MixedPrecisionPolicy`` casts the inputs of units only, but a layer may be outside of units, or
    get a float32 tensor that was created in between.
    """

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if all(parameter.dtype != half for parameter in layer.parameters(recurse=False)):
            return None
        return _cast((args, kwargs), torch.float32, half)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return _cast(output, half, torch.float32)

    # With parameters of its own, the user's module is called itself.
    outer = [module] if _has_own(module) else outer_modules(module)
    layers = filter(_has_own, module.modules())
    return [
        *(layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers),
        *(child.register_forward_hook(leave) for child in outer),
    ]


def _has_own(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        is_cast = isinstance(leaf, Tensor | PackedSequence) and leaf.data.dtype == source
        return leaf.to(target) if is_cast else leaf

    return moving.mapped(value, cast)
