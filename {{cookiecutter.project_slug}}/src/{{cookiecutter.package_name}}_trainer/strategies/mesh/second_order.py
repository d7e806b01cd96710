"""Refuse gradients of gradients where torch computes them without the other ranks' part."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...errors import UserError


def watch(module: nn.Module) -> None:
    """Refuse gradients of gradients through a module, whose activations or parameters are DTensors.

    torch moves their gradients between ranks and layouts by operations without a gradient.
    """
    module.register_forward_hook(_watch_outputs)


def _watch_outputs(module: nn.Module, _: Any, output: Any) -> None:
    for each in tree_leaves(output):
        if isinstance(each, Tensor) and each.requires_grad:
            each.register_hook(refuse)


def refuse(_: Any = None) -> None:
    """Raise UserError in a backward with ``create_graph``: only there gradients are recorded."""
    if torch.is_grad_enabled():
        raise UserError(
            "create_graph=True: the gradient of a gradient is not supported through layers of a "
            "tensor or context group, whose ranks would each compute a part of it; use "
            "strategy='ddp' or 'fsdp'"
        )
