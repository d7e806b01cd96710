"""Detect parameters that only some ranks use in a step, as in a mixture of experts.

Sharding engines reduce gradients in the order in which they are computed. If ranks use different
parameters, their collectives do not match: the run aborts, hangs, or adds gradients of different
parameters that have the same size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...launch import collectives
from .agreement import Agreement, Event

ELSEWHERE = (
    "use strategy='fsdp' or 'ddp', with --trainer.strategy_options.find_unused_parameters true"
)
OPTION = "--trainer.strategy_options.find_unused_parameters true"
_CALLS, _LEAVES_OUT = "calls", "leaves out"
_SHOWN = 3


def leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors for which a backward of a loss computes gradients."""
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        for each, _ in node.next_functions if node is not None else ():
            if each is None or each in seen:
                continue
            seen.add(each)
            if type(each).__name__ == "AccumulateGrad":
                yield each.variable  # type: ignore[attr-defined]
            else:
                stack.append(each)


def unused(loss: Tensor, parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Parameters, by name, on which a loss does not depend."""
    left = {id(each): (name, each) for name, each in parameters}
    for each in leaves(loss):
        left.pop(id(each), None)
        if not left:
            break
    return dict(left.values())


class _WithZeros(torch.autograd.Function):
    """A loss, with zero gradients for parameters on which it does not depend."""

    @staticmethod
    def forward(context: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        context.likes = [each.new_empty(0, requires_grad=False) for each in parameters]
        context.shapes = [each.shape for each in parameters]
        return loss.view_as(loss)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        pairs = zip(context.likes, context.shapes, strict=True)
        return gradients[0], *(like.new_zeros(()).expand(shape) for like, shape in pairs)


def with_zeros(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Extend a loss so that its backward gives zero gradients to unused parameters."""
    if not parameters:
        return loss
    result: Tensor = _WithZeros.apply(loss, *parameters)  # type: ignore[no-untyped-call]
    return result


class SameUse:
    """Ends a run with an explanation if ranks use different parameters.

    Args:
        parameters: The trainable parameters by name: leaves of the loss' graph.
        advice: What to do if ranks differ.
        timeout_seconds: Timeout of the strategy.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        advice: str,
        timeout_seconds: float,
    ) -> None:
        self._parameters = parameters
        self._advice = advice
        self._handles: list[Any] = []
        self._agreement: Agreement | None = None
        if collectives.world_size() > 1:
            self._agreement = Agreement(self._explain, timeout_seconds)

    def watch(
        self,
        units: Mapping[str, nn.Module],
        is_gathered: Callable[[nn.Module], bool] = lambda _: True,
    ) -> None:
        """Also compare calls of modules whose parameters are gathered when they are called.

        Args:
            units: The modules by name.
            is_gathered: Whether a call gathers the parameters of a module.
        """

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(name: str, unit: nn.Module, *_: Any) -> None:
            if is_gathered(unit):
                self.note(name)

        self._handles += [
            # Before the engine's own hook, which gathers.
            unit.register_forward_pre_hook(partial(called, name), prepend=True)
            for name, unit in units.items()
            if self._agreement is not None
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, name: str) -> None:
        """Compare the call of a module, or a use of a parameter, before it is gathered.

        Raises:
            UserError: Another rank does something else.
        """
        if self._agreement is not None:
            self._agreement.check(_CALLS, name)

    def check(self, loss: Tensor) -> None:
        """Compare which gradients the backward of a loss will compute; call this before backward.

        Raises:
            UserError: Ranks use different parameters.
        """
        if self._agreement is not None:
            self._agreement.check(_LEAVES_OUT, *unused(loss, self._parameters()))

    def close(self) -> None:
        """Stop comparing; call this before the process group is destroyed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._agreement is not None:
            self._agreement.close()

    def _explain(self, event: Event, rank: int, other: Event) -> str:
        own = collectives.rank()
        events = [(own, event, other), (rank, other, event)]
        if event[0] == other[0] == _LEAVES_OUT:
            parts = [
                f"rank {who} does not use {_shown(sorted({*this} - {*that}))}"
                for who, this, that in events
                if {*this} - {*that}
            ]
        else:
            parts = [f"rank {who} {_does(this)}" for who, this, _ in events]
        return f"ranks use different parameters in a step: {', '.join(parts)}; {self._advice}"


def _does(event: Event) -> str:
    return f"uses {event[1]}" if event[0] == _CALLS else "ends its forward"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def trained(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Trainable parameters by name."""
    return [(name, each) for name, each in module.named_parameters() if each.requires_grad]


def left_out(names: Sequence[str], advice: str) -> UserError:
    """The error to raise if torch's DDP waits for gradients that are not computed."""
    return UserError(
        f"rank {collectives.rank()} does not use {_shown(names)} in a step, and DDP waits for "
        f"their gradients; {advice}"
    )
