"""A module split into FairScale units, whose parameters are full only while they compute.

Imported when it is used, and before there is a process group: FairScale need not be installed.

Source: https://fairscale.readthedocs.io/en/stable/api/nn/fsdp.html
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, TrainingState
from fairscale.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap
from torch import Tensor, nn

from ..gradients.averaging import copy_gradient

# FairScale was written for torch 1.13, and calls functions that were renamed since.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\._(all_gather|reduce_scatter)_base` is a private function"
)
warnings.filterwarnings("ignore", "TypedStorage is deprecated")

# Modules that read the parameters of their children, which must be gathered with them.
_TOGETHER = {nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}


_ATTACHED = (
    *("_is_sharded", "_orig_size", "_fp32_shard", "_fp16_shard"),
    *("_full_param_padded", "_saved_grad_shard"),
)


class Unit(FullyShardedDataParallel):  # type: ignore[misc]
    """FairScale's FSDP; parameters stay the same objects, only their data is sharded."""

    def _cast_buffers(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: buffers are in place, and FairScale would cast them to float32."""

    def _register_post_backward_hooks(self) -> None:
        # FairScale adds a hook in every forward and never removes it.
        self.forget_hooks()
        super()._register_post_backward_hooks()

    def _post_backward_hook(self, param: nn.Parameter, *unused: Any) -> None:
        if self._require_backward_grad_sync:
            copy_gradient(param)
        super()._post_backward_hook(param, *unused)

    def _wait_for_post_backward(self) -> None:
        # FairScale requires that a backward has reached every unit. A unit that a step does not use
        # simply has no gradients.
        for unit in units(self):
            has_gradients = any(each.requires_grad for each in unit.params)
            state = TrainingState.BACKWARD_POST if has_gradients else TrainingState.BACKWARD_PRE
            unit.training_state = state
        super()._wait_for_post_backward()

    def forget_hooks(self) -> None:
        """Remove the hooks of earlier forwards."""
        for parameter in self.params:
            hook = vars(parameter).pop("_shard_bwd_hook", None)
            if hook is not None:
                hook[1].remove()

    def cut(self) -> None:
        """Free gathered parameters, also those that a forward gathered and no backward released."""
        self._free_full_params()
        self._use_fp32_param_shard()

    def drop_groups(self) -> None:
        """Drop references to process groups, and what FairScale has attached to parameters."""
        self.forget_hooks()
        self._reducer = self.process_group = self.process_group_reduce_scatter = None
        for parameter in self.params:
            for name in _ATTACHED:
                vars(parameter).pop(name, None)


def shard_module(
    step: nn.Module,
    module: nn.Module,
    device: torch.device,
    min_num_params: int,
    reduce_group: dist.ProcessGroup | None,
    dtype: torch.dtype | None,
) -> Unit:
    """Shard a module's parameters; its large children are replaced by units.

    Args:
        step: The module to call, which contains the user's module: the root unit's.
        module: The user's module.
        device: Device of the computation.
        min_num_params: Minimum number of parameters of a unit.
        reduce_group: Process group in which gradients are reduced.
        dtype: In which parameters are gathered; ``None``: float32, in which gradients are reduced.
    """
    options = {
        "process_group": dist.group.WORLD,
        "process_group_reduce_scatter": reduce_group,
        "flatten_parameters": False,
        "disable_reshard_on_root": False,
        "compute_device": device,
        "clear_autocast_cache": True,
        "mixed_precision": dtype is not None,
        "compute_dtype": dtype,
        "fp32_reduce_scatter": dtype is not None,
        "bucket_cap_mb": 0 if device.type == "cpu" else 25,
    }
    large = (each for each in module.modules() if _size(each) >= min_num_params)
    apart = {each for each in large if _is_used_elsewhere(each, module)}
    is_large = functools.partial(
        default_auto_wrap_policy,
        min_num_params=min_num_params,
        force_leaf_modules=_TOGETHER,
    )

    def policy(module: nn.Module, recurse: bool, **facts: Any) -> bool:
        return is_large(module, recurse, **facts) and (recurse or module not in apart)

    with enable_wrap(policy, wrapper_cls=Unit, **options):
        for name, child in list(module.named_children()):
            setattr(module, name, auto_wrap(child))
    root = Unit(step, **options)
    for unit in units(root):  # the root first, so that it is marked as the root
        unit._lazy_init()
    return root


def units(root: Unit) -> list[Unit]:
    """A unit, and those inside it."""
    return [each for each in root.modules() if isinstance(each, Unit)]


def named_units(root: Unit) -> dict[str, Unit]:
    """The units inside one, by the names of the user's modules."""
    named = root.module.module.named_modules()
    return {
        name.replace("._fsdp_wrapped_module", "").replace(".module", ""): each
        for name, each in named
        if isinstance(each, Unit)
    }


def undo(root: Unit, module: nn.Module) -> None:
    """Restore the user's modules in their places; their parameters stay sharded."""
    for unit in units(root):
        unit.drop_groups()
    for parent in list(module.modules()):
        children: Mapping[str, nn.Module | None] = parent._modules
        for name, child in list(children.items()):
            if isinstance(child, Unit):
                parent._modules[name] = child.module.module


def _size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _is_used_elsewhere(unit: nn.Module, root: nn.Module) -> bool:
    """Whether something outside a module also uses its parameters or submodules."""
    inside = set(unit.modules())
    own: set[Tensor] = set(unit.parameters())
    outside = [each for each in root.modules() if each not in inside]
    entries = sum(child in inside for each in outside for child in each._modules.values())
    return entries > 1 or any(
        parameter in own for each in outside for parameter in each._parameters.values()
    )
