"""How ``fsdp`` computes in half precision: without autocast, as torch's ``MixedPrecisionPolicy``.

Units gather their float32 parameters in half precision and free them after their forward, so that
no whole weight is kept for backward. The policy itself casts the inputs of units only, but a layer
may be outside of units, or get a float32 tensor that was created in between.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from ...data import moving
from .units import outer_modules


def cast_calls(module: nn.Module, half: torch.dtype) -> list[RemovableHandle]:
    """Cast inputs of layers in half precision, and to float32 what a step gets from the model.

    Losses are then computed in float32.

    Args:
        module: The user's module.
        half: The data type in which units are gathered.
    """

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if all(each.dtype != half for each in layer.parameters(recurse=False)):
            return None
        return _cast((args, kwargs), torch.float32, half)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return _cast(output, half, torch.float32)

    # With parameters of its own, the user's module is called itself.
    outer = [module] if _has_own(module) else outer_modules(module)
    return [
        *(
            each.register_forward_pre_hook(enter, with_kwargs=True)
            for each in module.modules()
            if _has_own(each)
        ),
        *(each.register_forward_hook(leave) for each in outer),
    ]


def _has_own(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    def cast(each: Any) -> Any:
        is_cast = isinstance(each, Tensor | PackedSequence) and each.data.dtype == source
        return each.to(target) if is_cast else each

    return moving.mapped(value, cast)
