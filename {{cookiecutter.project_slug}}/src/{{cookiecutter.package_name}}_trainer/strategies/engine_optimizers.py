"""The optimizers of a user that an engine creates again, or gives something else to step."""

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigurationError, UserError, one_line
from .optimizer_state import STEPS_SHARD

T = TypeVar("T", bound=Optimizer)


class EngineGroups:
    """Parameter groups that an engine has taken over: which parameters they have may not change.

    ``shown``: what hooks find in each group of the engine's optimizers, instead of what it steps.
    ``grows``: whether the engine steps groups that are added.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        shown: Sequence[Sequence[Tensor]] | None = None,
        grows: bool = False,
    ) -> None:
        self._optimizers, self._shown, self._grows = optimizers, shown, grows
        self._groups = [list(each.param_groups) for each in optimizers]
        self._noted = [len(own) if shown else own for own in self._parameters()]

    def _parameters(self) -> list[list[int]]:
        groups = (group for each in self._optimizers for group in each.param_groups)
        return [[*map(id, group["params"])] for group in groups]

    def check(self) -> None:
        """Raise UserError if groups have changed; of ``shown`` ones, outside of :meth:`showing`."""
        found: list[Any] = self._parameters()
        found = found[: len(self._noted)] if self._grows else found
        if len(found) != len(self._noted) or (self._shown is None and found != self._noted):
            raise self._changed()

    def _changed(self) -> UserError:
        for each, groups in zip(self._optimizers, self._groups, strict=True):
            each.param_groups[:] = groups  # for the engine's teardown
        name = type(self._optimizers[0]).__name__
        return UserError(
            f"the parameter groups of {name} have changed since the fit began, and the strategy "
            "steps those of then: give all parameters to configure_optimizers, and change "
            "requires_grad; or use strategy='fsdp'"
        )

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Context of a hook, in which groups have parameters, not what an engine steps."""
        groups = [group for each in self._optimizers for group in each.param_groups]
        stepped = [group["params"] for group in groups] if self._shown else []
        for group, own in zip(groups, self._shown or (), strict=False):
            group["params"] = list(own)
        try:
            yield
            shown = [[*map(id, own)] for own in self._shown or ()]
            if self._shown is not None and self._parameters() != shown:
                raise self._changed()
        finally:
            for group, given in zip(groups, stepped, strict=False):
                group["params"] = given


@contextmanager
def stepping(optimizer: Optimizer, part: str, signs: str = "") -> Iterator[None]:
    """Context of an engine's step of ``part``, which an optimizer may not support.

    ``signs``: a pattern of the errors that say so; default: all that a user's optimizer raises.
    """
    try:
        yield
    except (LookupError, RuntimeError, UserError) as error:
        frames = traceback.walk_tb(error.__traceback__)
        is_own = any(frame.f_locals.get("self") is optimizer for frame, _ in frames)
        is_own = is_own and not type(optimizer).__module__.startswith("torch.optim")
        if not (re.search(signs, str(error)) if signs else is_own):
            raise
        raise UserError(
            f"{type(optimizer).__name__} cannot step {part} ({one_line(error)}); use AdamW, or "
            "strategy='ddp'"
        ) from error


def sharded_optimizer(sharded: Callable[..., T], optimizer: Optimizer) -> T:
    """Create a sharded optimizer, whose inner one has the class and options of the user's.

    It has all parameters in its groups; its inner one, ``optim``, has this process' shard of them
    and their state (torch's ``ZeroRedundancyOptimizer``, and similar ones).
    """
    kind, groups = type(optimizer), [dict(group) for group in optimizer.param_groups]
    # Some optimizers have defaults that are no arguments (AdamW: decoupled_weight_decay).
    takes = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in takes}
    try:
        made = sharded(groups, kind, **options)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise not_created(optimizer, error) from None
    vars(made)[STEPS_SHARD] = True
    inner: Any = vars(made)["optim"]
    copy_settings(optimizer, inner)
    made.state = inner.state  # which the user's code may reset
    return made


def not_created(optimizer: Optimizer, error: Exception) -> ConfigurationError:
    """The error of an optimizer that an engine cannot create again, as one that wraps another."""
    return ConfigurationError(
        f"configure_optimizers gave {type(optimizer).__name__}, which cannot be created again from "
        f"its settings ({one_line(error)}); use strategy='ddp'"
    )


def copy_settings(optimizer: Optimizer, made: Optimizer) -> None:
    """Take over numbers and text that are attributes of an optimizer that was created again."""
    for name, value in vars(optimizer).items():
        if isinstance(value, str | int | float | None):
            vars(made)[name] = value
