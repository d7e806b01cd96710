"""Refuse a fit whose loss depends on no parameter, or whose new layers no optimizer has."""

from weakref import WeakSet

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
    """

    def __init__(self, strategy: Strategy, optimization: Optimization) -> None:
        self._optimization = optimization
        self._has_run, self._is_reached, self.is_waiting = False, False, True
        optimized = set(map(id, optimization.parameters))
        trained = [each for each in strategy.module.parameters() if each.requires_grad]
        # An engine's optimizers may step other tensors than the module's.
        own = [each for each in trained if id(each) in optimized] or trained
        self._layers = WeakSet(strategy.module.modules())
        self._module = strategy.module
        self._hook = register_multi_grad_hook(own, self._reach, mode="any")

    def check_layers(self) -> None:
        """Raise a UserError if a hook has added a layer that is not trained with the others."""
        optimized = {*map(id, self._optimization.parameters)}
        is_alone = collectives.world_size() == 1
        for name, layer in self._module.named_modules():
            own = [] if layer in self._layers else layer.parameters(recurse=False)
            new = [each for each in own if each.requires_grad]
            if any(not (is_alone and id(each) in optimized) for each in new):
                alone = ", or give its parameters to an optimizer by add_param_group" * is_alone
                raise UserError(
                    f"{name} ({type(layer).__name__}) was added after configure_optimizers, and "
                    f"would not be trained: create it in __init__{alone}"
                )

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
