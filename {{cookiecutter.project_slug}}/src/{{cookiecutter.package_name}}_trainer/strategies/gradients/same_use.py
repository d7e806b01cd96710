"""Detect parameters that only some ranks use in a step, as in a mixture of experts.

Sharding engines reduce gradients in the order in which they are computed. If ranks use different
parameters, their collectives do not match: the run aborts, hangs, or adds gradients of different
parameters that have the same size.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import UserError
from ...launch import collectives

Event = tuple[str, ...]

ELSEWHERE = (
    "use strategy='fsdp' or 'ddp', with --trainer.strategy_options.find_unused_parameters true"
)
OPTION = "--trainer.strategy_options.find_unused_parameters true"
_CALLS, _ENDS, _LEAVES_OUT = "calls", "ends", "leaves out"
_SHOWN = 3
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_BETWEEN_POLLS = 0.005
# How far a rank may run ahead of one that asks: collectives block it much earlier.
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

    Ranks compare events, which occur in the same order on every rank: calls of modules, and what a
    backward leaves out. Nothing is sent as long as each rank repeats the sequence on which all
    ranks last agreed: an event is expected if it followed the last one then. All ranks expect the
    same, so if they differ, at least one asks its peers, through the process group's store.

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
        self._expected: dict[Event, Event] = {}
        self._last: Event = ()
        self._count = 0
        self._recent: deque[tuple[Event, bool]] = deque(maxlen=_REMEMBERED)
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        if self._thread is not None:
            self._thread.join()

    def _compare(self, event: Event) -> None:
        is_expected = self._expected.get(self._last) == event
        if not is_expected:
            self._ask_peers(event)
            self._expected[self._last] = event
        self._last = event
        self._recent.append((event, not is_expected))
        self._count += 1

    def _ask_peers(self, event: Event) -> None:
        number, own = self._count, json.dumps([collectives.rank(), *event])
        first = json.loads(self._store.compare_set(f"{number}/first", "", own))
        if tuple(first[1:]) != event:
            self._store.set(f"{number}/answer", own)
            raise self._difference(event, first)
        if first[0] == collectives.rank():
            self._store.set(f"asked/{self._store.add('asked', 1)}", str(number))
        if self._store.add(f"{number}/count", 1) == collectives.world_size():
            self._store.set(f"{number}/answer", "[]")
        deadline = time.monotonic() + self._timeout_seconds
        while not self._store.check([f"{number}/answer"]):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"wait timeout after {self._timeout_seconds:g} s")
            time.sleep(_SECONDS_BETWEEN_POLLS)
        if answer := json.loads(self._store.get(f"{number}/answer")):
            raise self._difference(event, answer)

    def _serve(self) -> None:
        """Send this rank's events to peers that ask, unless this rank has asked itself."""
        seen, waiting = 0, set[int]()
        # If the store is gone, the run has ended, and the main thread reports why.
        with contextlib.suppress(RuntimeError):
            while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
                asked = self._store.add("asked", 0)
                waiting |= {
                    int(self._store.get(f"asked/{each}")) for each in range(seen + 1, asked + 1)
                }
                seen = asked
                for number in [each for each in waiting if each < self._count]:
                    waiting.remove(number)
                    self._send(number)

    def _send(self, number: int) -> None:
        back = self._count - number
        if back <= len(self._recent):
            event, has_asked = self._recent[-back]
            if not has_asked:
                own = json.dumps([collectives.rank(), *event])
                self._store.set(f"{number}/answer", own)

    def _difference(self, event: Event, answer: list[Any]) -> UserError:
        rank, other = answer[0], tuple(answer[1:])
        events = [(collectives.rank(), event, other), (rank, other, event)]
        if event[0] == other[0] == _LEAVES_OUT:
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
