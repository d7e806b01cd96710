"""The user's hooks of gradients, and gradients that user code may set and keep."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...launch import output


def count(parameter: Any) -> int:
    """The number of hooks of a parameter's gradient."""
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def note(named: Iterable[tuple[str, Tensor]]) -> None:
    """Say that a hook sees the gradient of one process."""
    for name in [name for name, parameter in named if count(parameter)][:1]:
        does = f"{name} has a hook of its gradient, which runs before ranks average"
        advice = "what is not linear, such as a clamp, belongs in on_before_optimizer_step"
        output.print_once(f"note: {does}: {advice}")


@contextmanager
def without_hooks(parameters: Iterable[Any]) -> Iterator[None]:
    """Context in which hooks of gradients are not called."""
    kept = [(p, p._backward_hooks, p._post_accumulate_grad_hooks) for p in parameters if count(p)]
    for parameter, _, _ in kept:
        parameter._backward_hooks = OrderedDict()
        parameter._post_accumulate_grad_hooks = OrderedDict()
    yield
    for parameter, before, after in kept:
        parameter._backward_hooks = before
        parameter._post_accumulate_grad_hooks = after


def copy_gradients(parameters: Iterable[Tensor], *_: object) -> None:
    """Give parameters copies of gradients that an engine overwrites in the next step."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def copy_in_steps(
    parameters: Iterable[Tensor], pairs: Iterable[tuple[Optimizer, Optimizer]]
) -> list[RemovableHandle]:
    """Copy gradients before steps; ``pairs``: a user's optimizer, and what steps in its place."""
    own = [step for user, step in pairs if not type(user).step.__module__.startswith("torch.")]
    return [step.register_step_pre_hook(partial(copy_gradients, parameters)) for step in own]
