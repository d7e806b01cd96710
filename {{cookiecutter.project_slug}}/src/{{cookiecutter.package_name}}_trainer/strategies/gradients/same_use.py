"""Detect parameters that only some ranks use in a step, as in a mixture of experts.

Sharding engines reduce gradients in the order in which they are computed. If ranks use different
parameters, their collectives do not match: the run aborts, hangs, or adds other gradients.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...errors import UserError, listed
from ...launch import collectives, rendezvous

Event = tuple[str, ...]
Named = Iterable[tuple[str, Tensor]]
OPTION = "--trainer.strategy_options.find_unused_parameters true"
_SHOWN, _REMEMBERED = 3, 4096
_SECONDS_BETWEEN_POLLS, _PART_OF_TIMEOUT = 0.005, 0.25


def unused(loss: Tensor, parameters: Named) -> dict[str, Tensor]:
    """Parameters, by name, for which a backward of a loss computes no gradient."""
    left = {id(parameter): (name, parameter) for name, parameter in parameters}
    seen, stack = set(), [loss.grad_fn]
    while stack and left:
        node = stack.pop()
        for child, _ in node.next_functions if node is not None else ():
            if child is None or child in seen:
                continue
            seen.add(child)
            if type(child).__name__ == "AccumulateGrad":
                left.pop(id(child.variable), None)  # type: ignore[attr-defined]
            else:
                stack.append(child)
    return dict(left.values())


def with_zeros(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Extend a loss so that its backward gives zero gradients to unused parameters."""
    if not parameters:
        return loss
    empty = torch.cat([parameter.unsqueeze(0)[:0].flatten() for parameter in parameters])
    return loss + empty.sum().real.to(loss.dtype)


class SameUse:
    """Ends a run with an explanation if ranks use different parameters.

    Ranks compare events: calls of modules, and what a backward leaves out. After the same events of
    a step, each expects what followed last time. One that does something else first asks its peers,
    through the process group's store, and waits until all have asked the same. One that does what
    was expected never asks: it waits in a collective of the engine.

    ``parameters``: the trainable ones by name, leaves of the loss' graph. ``seconds``: how long a
    rank that asks waits for its peers; a quarter of it, if they may do what was expected.
    ``more_seconds``: beside it, for what is new, and so compiled.
    """

    def __init__(
        self, parameters: Callable[[], Named], advice: str, seconds: float, more_seconds: float = 0
    ) -> None:
        self._parameters, self._advice = parameters, advice
        self._seconds, self._more_seconds = seconds, more_seconds
        self._followed: dict[int, Event] = {}  # by a hash of the events before, in a step
        self._before = self._count = self._asked = 0
        self._handles: list[RemovableHandle] = []

    def watch(
        self, units: Mapping[str, nn.Module], gathers: Callable[[nn.Module], bool] = lambda _: True
    ) -> None:
        """Also compare calls of modules, by name, if they gather the parameters of a module."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(name: str, unit: nn.Module, *_: Any) -> None:
            if gathers(unit):
                self.note(f"uses {name}")

        for name, unit in units.items():  # before the engine's own hook, which gathers
            hook = partial(called, name)
            self._handles.append(unit.register_forward_pre_hook(hook, prepend=True))

    def begin(self, stage: str) -> None:
        """Note that a step of a stage begins; it is compared with earlier ones of this stage."""
        self._before = hash(stage)

    def note(self, *event: str) -> None:
        """Compare what this rank is about to do, in words: a UserError if another differs."""
        expected = self._followed.get(self._before)
        if event != expected and collectives.world_size() > 1:
            self._ask_peers(event, expected)
            if len(self._followed) == _REMEMBERED:  # of steps that never repeat
                self._followed.clear()
            self._followed[self._before] = event
        self._before = hash((self._before, event))
        self._count += 1

    def check(self, loss: Tensor) -> None:
        """As :meth:`note`, of the gradients that the backward of a loss is about to compute."""
        if collectives.world_size() > 1:
            self.note(*(f"does not use {name}" for name in unused(loss, self._parameters())))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _ask_peers(self, event: Event, expected: Event | None) -> None:
        store = dist.PrefixStore("same_use", dist.distributed_c10d._get_default_store())
        key, ours = self._asked, [self._count, event, collectives.rank()]
        self._asked += 1
        first = json.loads(store.compare_set(f"{key}/first", "", json.dumps(ours)))
        if first[:2] != [self._count, [*event]]:
            store.set(f"{key}/answer", json.dumps(ours))
            raise self._difference(event, first[1], f"rank {first[2]}")
        if store.add(f"{key}/count", 1) == collectives.world_size():
            for name in ("first", "count", "answer"):  # all ranks have read the previous ones
                store.delete_key(f"{key - 1}/{name}")
            store.set(f"{key}/answer", "[]")
        seconds = self._seconds * _PART_OF_TIMEOUT
        if expected is None:
            seconds = self._seconds + self._more_seconds
        is_answered = partial(store.check, [f"{key}/answer"])
        if not rendezvous.poll(is_answered, seconds, _SECONDS_BETWEEN_POLLS):
            if expected is None:  # then a rank does not come, whatever it does
                raise dist.DistStoreError(f"wait timeout after {seconds:g} s")
            raise self._difference(event, expected, "another rank")
        if answer := json.loads(store.get(f"{key}/answer")):
            raise self._difference(event, answer[1], f"rank {answer[2]}")

    def _difference(self, ours: Sequence[str], theirs: Sequence[str], peer: str) -> UserError:
        sides = [(f"rank {collectives.rank()}", ours, theirs), (peer, theirs, ours)]
        extras = [(who, sorted({*this} - {*that})) for who, this, that in sides]
        parts = ", ".join(f"{who} {listed(extra, _SHOWN)}" for who, extra in extras if extra)
        return UserError(f"ranks use different parameters in a step: {parts}; {self._advice}")


def trained(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def left_out(names: Sequence[str], advice: str) -> UserError:
    """The error to raise if torch's DDP waits for gradients that are not computed."""
    problem = f"rank {collectives.rank()} does not use {listed(names, _SHOWN)} in a step"
    return UserError(f"{problem}, and DDP waits for their gradients; {advice}")
