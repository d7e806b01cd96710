"""Count the floating-point operations of a training step, for ``speed/mfu``.

Source: https://docs.pytorch.org/docs/stable/meta.html and torch.utils.flop_counter
"""

import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..data import batch_length, moving, randomness
from ..errors import UserError, one_line
from ..module import TrainingModule
from ..strategies.base import read_loss

_META = torch.device("meta")


def flops_per_sample(module: TrainingModule, batch: Any) -> float:
    """Operations of forward and backward of one sample, as torch counts them.

    A copy of the module runs a training step on the meta device, which needs neither time nor
    memory for tensors. The count does not depend on the strategy.

    Args:
        module: The user's, before a strategy changes it.
        batch: A batch of the training loader.

    Raises:
        UserError: The step cannot run on the meta device, or has no operations that are counted.
    """
    name = type(module).__name__
    try:
        with randomness.kept():
            counted = _count(_on_meta(module), moving.move(batch, _META))
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"peak_flops: the operations of {name}.training_step cannot be counted on the meta "
            f"device ({one_line(error)}): set flops_per_sample of {name}"
        ) from error
    if not counted:
        raise UserError(
            f"peak_flops: torch counts no operations in {name}.training_step, only those of "
            f"products and convolutions: set flops_per_sample of {name}"
        )
    return counted / batch_length(batch)


def _count(module: TrainingModule, batch: Any) -> int:
    # Torch does not count the operations of fused attention on every device.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        read_loss(module.training_step_end(module.training_step(batch, 0))).backward()
    return int(counter.get_total_flops())


def _on_meta(module: TrainingModule) -> TrainingModule:
    """Copy a module without its data; it belongs to no run."""
    state, memo = module.trainer_state, dict[int, Any]()
    for each in chain(module.parameters(), module.buffers()):
        empty = torch.empty_like(each, device=_META)
        is_parameter = isinstance(each, nn.Parameter)
        memo[id(each)] = nn.Parameter(empty, each.requires_grad) if is_parameter else empty
    memo[id(state)] = replace(state, run=None, device=_META)
    return copy.deepcopy(module, memo)
