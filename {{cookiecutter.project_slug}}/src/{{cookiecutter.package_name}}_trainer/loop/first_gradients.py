"""Refuse a fit whose loss depends on no parameter, when its first gradients are computed."""

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from ..errors import UserError
from ..launch import collectives
from ..strategies import Strategy
from ..strategies.optimizers import UNREACHED, Optimization


class FirstGradients:
    """Whether a backward has reached a parameter of the optimizers.

    Autograd tells it of parameters whose gradients an engine takes away; ``grad`` tells it of those
    that an engine computes with other tensors. ``is_waiting``: the check is not made yet.
    ``optimization``: what the strategy's ``setup`` returned.
    """

    def __init__(self, strategy: Strategy, optimization: Optimization) -> None:
        self._optimization = optimization
        self._has_run, self._is_reached, self.is_waiting = False, False, True
        optimized = set(map(id, optimization.parameters))
        trained = [each for each in strategy.module.parameters() if each.requires_grad]
        # An engine's optimizers may step other tensors than the module's.
        own = [each for each in trained if id(each) in optimized] or trained
        self._hook = register_multi_grad_hook(own, self._reach, mode="any")

    def _reach(self, _: Tensor) -> None:
        self._is_reached = True

    def note(self) -> None:
        """Note the gradients that there are after a backward."""
        if self.is_waiting:
            self._has_run = True
            self._is_reached |= any(each.grad is not None for each in self._optimization.parameters)

    def check(self, together: bool = True) -> None:
        """Check once, after a backward: UserError if no parameter was reached.

        ``together``: whether all ranks call this after the same backward: one of them may have a
        loss of no parameter, for example in a mixture of experts.
        """
        if not (self.is_waiting and self._has_run):
            return
        self.is_waiting = False
        self._hook.remove()
        reached = torch.tensor([self._is_reached], dtype=torch.int32)
        if together:
            reached = collectives.all_reduce(reached, "max")
        if not reached.item():
            raise UserError(UNREACHED)
