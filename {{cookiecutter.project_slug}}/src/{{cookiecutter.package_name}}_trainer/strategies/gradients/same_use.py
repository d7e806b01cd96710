"""Detect parameters that only some ranks use in a step, as in a mixture of experts.

Sharding engines reduce gradients in the order in which they are computed. If ranks use different
parameters, their collectives do not match: the run aborts, hangs, or adds gradients of different
parameters that have the same size.
"""

import contextlib
import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UserError
from ...launch import collectives, rendezvous

Event = tuple[str, ...]

ELSEWHERE = (
    "use strategy='fsdp' or 'ddp', with --trainer.strategy_options.find_unused_parameters true"
)
OPTION = "--trainer.strategy_options.find_unused_parameters true"
_CALLS, _ENDS, _LEAVES_OUT = "calls", "ends", "leaves out"
_SHOWN = 3
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_BETWEEN_POLLS = 0.005
_SECONDS_TO_ANSWER = 5.0
# Events in which a step must repeat; also how far a rank may run ahead of one that asks.
_REMEMBERED = 4096


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


def with_zeros(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Extend a loss so that its backward gives zero gradients to unused parameters."""
    if not parameters:
        return loss
    empty = torch.cat([each.unsqueeze(0)[:0].flatten() for each in parameters])
    return loss + empty.sum().real.to(loss.dtype)


class SameUse:
    """Ends a run with an explanation if ranks use different parameters.

    Ranks compare events, which occur in the same order on every rank: calls of modules, and what a
    backward leaves out. Nothing is sent while events repeat: each is expected to be that of one
    period ago. The period is chosen when ranks ask: from there, the longest sequence is repeated.
    All ranks expect the same, so if they differ, at least one asks its peers, through the process
    group's store.

    Args:
        parameters: The trainable parameters by name: leaves of the loss' graph.
        advice: What to do if ranks differ.
        timeout_seconds: How long a rank that asks waits for its peers.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[tuple[str, Tensor]]],
        advice: str,
        timeout_seconds: float,
    ) -> None:
        self._parameters = parameters
        self._advice = advice
        self._timeout_seconds = timeout_seconds
        self._handles: list[Any] = []
        self._events: dict[int, Event] = {}
        """The latest ones by number, with the one that is compared."""
        self._count = self._asked = 0
        """Number of events, and of those about which this rank has asked, all compared."""
        self._period = 1
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if collectives.world_size() > 1:
            default = dist.distributed_c10d._get_default_store()
            self._store: dist.Store = dist.PrefixStore("same_use", default)
            self._thread = threading.Thread(target=self._serve, name="same_use", daemon=True)
            self._thread.start()

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
            if self._thread is not None
        ]

    def note(self, name: str) -> None:
        """Compare the call of a module, or a use of a parameter, before it is gathered.

        Raises:
            UserError: Another rank does something else.
        """
        if self._thread is not None:
            self._compare((_CALLS, name))

    def note_end(self) -> None:
        """As :meth:`note`, of the end of a forward whose batch may be skipped."""
        if self._thread is not None:
            self._compare((_ENDS,))

    def check(self, loss: Tensor) -> None:
        """Compare which gradients the backward of a loss will compute; call this before backward.

        Raises:
            UserError: Ranks use different parameters.
        """
        if self._thread is not None:
            self._compare((_LEAVES_OUT, *unused(loss, self._parameters())))

    def close(self) -> None:
        """Stop comparing; call this before the process group is destroyed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._ended.set()
        if self._thread is not None:  # no longer: a store whose server hangs never answers
            self._thread.join(_SECONDS_TO_ANSWER)

    def _compare(self, event: Event) -> None:
        expected = self._events.get(self._count - self._period)
        self._events[self._count] = event
        if event != expected:
            self._ask_peers(event, expected)
            self._period = _period(self._events.values())
        self._count += 1
        self._events.pop(self._count - _REMEMBERED, None)

    def _ask_peers(self, event: Event, expected: Event | None) -> None:
        key, own = self._asked, [collectives.rank(), self._count, *event]
        self._asked += 1
        first = json.loads(self._store.compare_set(f"{key}/first", "", json.dumps(own)))
        if first[1:] != own[1:]:
            self._store.set(f"{key}/answer", json.dumps(own))
            raise self._difference(first, expected)
        if self._store.add(f"{key}/count", 1) == collectives.world_size():
            for name in ("first", "count", "answer"):  # all ranks have read the previous ones
                self._store.delete_key(f"{key - 1}/{name}")
            self._store.set(f"{key}/answer", "[]")
        # Not wait, in which the store could not be used to answer peers.
        is_answered = partial(self._store.check, [f"{key}/answer"])
        if not rendezvous.poll(is_answered, self._timeout_seconds, _SECONDS_BETWEEN_POLLS):
            raise dist.DistStoreError(f"wait timeout after {self._timeout_seconds:g} s")
        if answer := json.loads(self._store.get(f"{key}/answer")):
            raise self._difference(answer, expected)

    def _serve(self) -> None:
        """Answer peers that ask about an event that was expected here."""
        # If the store is gone, the run has ended, and the main thread reports why.
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
                key = self._asked
                # Not get, which waits if the key was deleted meanwhile.
                first = json.loads(self._store.compare_set(f"{key}/first", "[]", "[]"))
                number = first[1] if first else self._count
                if number < self._count and key == self._asked and number in self._events:
                    own = [collectives.rank(), number, *self._events[number]]
                    self._store.set(f"{key}/answer", json.dumps(own))

    def _difference(self, answer: list[Any], expected: Event | None) -> UserError:
        rank, number, *names = answer
        own, other = self._events.get(number, ()), tuple(names)
        if number > self._count:  # the other rank has done what was expected, and has continued
            own, other = self._events[self._count], expected or ()
        events = [(collectives.rank(), own, other), (rank, other, own)]
        if own[:1] == other[:1] == (_LEAVES_OUT,):
            parts = [
                f"rank {who} does not use {_shown(extra)}"
                for who, this, that in events
                if (extra := sorted({*this} - {*that}))
            ]
        else:
            parts = [f"rank {who} {_does(this)}" for who, this, _ in events]
        return UserError(
            f"ranks use different parameters in a step: {', '.join(parts)}; {self._advice}"
        )


def _period(events: Iterable[Event]) -> int:
    """How far before the end of a sequence is the first copy of as much of its end as possible."""
    signs: dict[Event, str] = {}
    text = "".join(signs.setdefault(each, chr(len(signs))) for each in events)

    def copy_of(length: int) -> int:
        return text.find(text[len(text) - length :], 0, -1)

    length = bisect_left(range(len(text)), True, key=lambda each: copy_of(each) < 0) - 1
    return len(text) - length - copy_of(length)


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
