"""Average gradients after backward, if no engine averages them during it.

torch's DDP averages the gradients of one backward after its forward, for the parameters that were
trainable when it was created. In manual optimization, a step calls backward several times inside
its forward, each time for some parameters only; and a layer may be unfrozen later.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...checkpoint import dtensors
from ...errors import UserError
from ...launch import collectives
from ..engine_optimizers import requiring_grad
from . import sparse

_NONE, _SPARSE, _DENSE = range(3)  # if processes have different kinds, the maximum is used


class GradientAverage:
    """Averages gradients that have changed since they were last averaged.

    Gradients of parameters that are toggled off are not averaged until their own backward.

    ``parameters`` have the same order on every process; of DTensors, local shards are averaged.
    ``group``: the processes that average; default: all; dense gradients only. ``add_up``: sums a
    dense tensor over these processes, perhaps in place; default: over the group.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group: dist.ProcessGroup | None = None,
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._group, self._add_up = group, add_up
        self._parameters = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        self._averaged: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        # torch hooks need a tensor that requires grad; a frozen one may be unfrozen later.
        with requiring_grad(self._parameters, True):
            for index, parameter in enumerate(self._parameters):
                changed = partial(self._changed, index)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(changed))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._group = [], None

    def _changed(self, index: int, parameter: Tensor) -> None:
        self._averaged.discard(index)

    def average(self) -> None:
        """Average over all processes; a process that did not use a parameter contributes zero."""
        if not any(p.requires_grad for p in self._parameters):  # as on every process
            return
        waiting = [self._pending(index) for index in range(len(self._parameters))]
        waiting = collectives.all_reduce(torch.tensor(waiting), "max", self._group).tolist()
        self._averaged.update(index for index, kind in enumerate(waiting) if kind != _NONE)
        dense = []
        for parameter, kind in zip(self._parameters, waiting, strict=True):
            if kind == _DENSE:
                dense.append(parameter)
            elif kind == _SPARSE:
                gradient = sparse.zeros(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = sparse.average(gradient)
        add_up = self._add_up or partial(collectives.sum_in_place, group=self._group)
        reduce_dense(dense, add_up, dist.get_world_size(self._group))

    def _pending(self, index: int) -> int:
        parameter = self._parameters[index]
        if parameter.grad is None or index in self._averaged or not parameter.requires_grad:
            return _NONE
        return _SPARSE if parameter.grad.is_sparse else _DENSE


def reduce_dense(
    parameters: Iterable[Tensor], add_up: Callable[[Tensor], Tensor], divisor: int
) -> None:
    """Sum dense gradients, all of a data type at once, and divide them; a missing one is zero."""
    same_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:  # another process has a dense gradient
            parameter.grad = parameter.grad.to_dense()
        gradient = dtensors.local(parameter.grad)
        same_type[gradient.dtype, gradient.device].append(gradient)
    for gradients in same_type.values():
        flat = add_up(torch.cat([gradient.flatten() for gradient in gradients])).div_(divisor)
        reduced = flat.split([gradient.numel() for gradient in gradients])
        shaped = [mean.view_as(gradient) for gradient, mean in zip(gradients, reduced, strict=True)]
        torch._foreach_copy_(gradients, shaped)


def reduce_used(
    parameters: Iterable[Tensor], group: dist.ProcessGroup | None, divisor: int
) -> None:
    """Reduce the gradients of the parameters that any process of a group has used."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    used = [parameter for parameter, is_used in _used_anywhere(trained, group) if is_used]
    reduce_dense(used, partial(collectives.sum_in_place, group=group), divisor)


@contextmanager
def leaving_out_unused(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Averaging by an engine that creates zeros: what no process has used has no gradient after it.

    Momentum and weight decay would use them.
    """
    used = _used_anywhere(parameters, None)
    yield
    for parameter, is_used in used:
        if not is_used:
            parameter.grad = None


def _used_anywhere(
    parameters: Sequence[Tensor], group: dist.ProcessGroup | None
) -> list[tuple[Tensor, float]]:
    """Each parameter with 1.0 if any process of a group has its gradient, otherwise with 0.0."""
    has = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    used = collectives.all_reduce(has, "max", group).tolist() if parameters else []
    return list(zip(parameters, used, strict=True))


@contextmanager
def accumulated_once(module: nn.Module) -> Iterator[None]:
    """Raise UserError if a backward here adds to a gradient twice, as reentrant checkpoints do."""
    seen: set[str] = set()

    def note(name: str, _: Tensor) -> None:
        if name in seen:
            raise UserError(
                f"{name} gets two gradients in one backward, of which only the first is averaged: "
                "it is in two reentrant checkpoints; use torch.utils.checkpoint with "
                "use_reentrant=False"
            )
        seen.add(name)

    with ExitStack() as stack:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hook: Any = parameter.register_hook(partial(note, name))
                stack.callback(hook.remove)
        yield


def copy_gradient(parameter: Tensor) -> None:
    """Copy a gradient during backward, before an engine averages it in place."""
    # It may share memory with one that backward still uses, as of a bias added to a single sample.
    if parameter.grad is not None:
        parameter.grad = parameter.grad.clone()


class FixedOrder:
    """Reduces the gradients of ``count`` parameters, the last parameter first.

    A backward may compute them in another order on each rank: those of an LSTM depend on the
    lengths of its sequences. An engine that reduces each when it is computed would then add up
    gradients of different parameters. Here a gradient waits for those of later parameters.
    """

    def __init__(self, count: int) -> None:
        self._count = self._next = count
        self._ready: dict[int, Callable[[], object]] = {}

    def note(self, index: int, reduce: Callable[[], object]) -> None:
        """Note that the gradient of a parameter can be reduced; reduce those whose turn it is."""
        if index in self._ready or index >= self._next:  # twice, which is for the engine to judge
            reduce()
        self._ready[index] = reduce
        while self._next - 1 in self._ready:
            self._next -= 1
            self._ready.pop(self._next)()

    def finish(self) -> None:
        """Reduce what waits for parameters that this backward did not use."""
        for index in sorted(self._ready, reverse=True):
            self._ready.pop(index)()
        self._next = self._count
